"""Gradients averaged as FP8 codes by two and three processes: bound, equal ranks, bytes, mu, what is not finite, refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8compile.extras.links.ddp import GradientExchange, compress_gradients
from fp8compile.numerics.formats import E4M3, E5M2
from fp8compile.numerics.gradient_scaling import MU_RANGE, next_mu
from tests.support.exchanged import averaged, model_of, trained
from tests.support.ranks import on_ranks
from tests.support.reference import sqnr_db

PARAMETERS = sum(p.numel() for p in model_of().parameters())
TENSORS = 4


def mean_of(tensors: list[list[Tensor]], mu: float, format: str = "e4m3") -> list[dict[str, Any]]:
    """What each rank has of the tensors' mean."""
    found = on_ranks(len(tensors), averaged, [[t.tolist() for t in mine] for mine in tensors], mu, format)
    return [{**each, "mean": [torch.tensor(t) for t in each["mean"]]} for each in found]


def steps_of(count: int, format: str | None, bucket_mb: float = 25.0, dtype: str = "float32") -> list[dict[str, Any]]:
    """What two ranks have after some steps."""
    found = on_ranks(2, trained, count, format, bucket_mb, dtype)
    return [{**each, "gradients": [torch.tensor(g) for g in each["gradients"]]} for each in found]


def tensors_of(ranks: int, scale: float = 1e-3) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        [scale * torch.randn(shape, generator=generator) for shape in ((33, 17), (5,), (1,), (8, 8))]
        for _ in range(ranks)
    ]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_each_element_is_within_two_roundings_of_the_mean(ranks: int, format: str) -> None:
    """A rank's rounding is half an ulp of its element at most, the mean's half an ulp of itself; subnormals half a step."""
    fmt = E4M3 if format == "e4m3" else E5M2
    tensors = tensors_of(ranks)
    found = mean_of(tensors, 1.0, format)
    for t in range(TENSORS):
        each = torch.stack([mine[t] for mine in tensors]).double()
        step = each.abs().max() / fmt.max * fmt.smallest / 2
        first = torch.maximum(each.abs() * fmt.half_ulp, step).mean(0)
        bound = first + torch.maximum((each.mean(0).abs() + first) * fmt.half_ulp, step) + 2.0**-20 * each.abs().max()
        assert ((found[0]["mean"][t].double() - each.mean(0)).abs() <= bound).all()
        assert all(torch.equal(found[0]["mean"][t], other["mean"][t]) for other in found[1:])


def test_a_step_of_ddp_is_as_near_as_one_byte_can_be_and_equal_on_both_ranks() -> None:
    """One rounding of normal numbers is 31.8 dB in E4M3, so two are 28.8; 10 dB below that at the worst."""
    plain, coded = steps_of(1, None), steps_of(1, "e4m3")
    for ours, other, exact in zip(coded[0]["gradients"], coded[1]["gradients"], plain[0]["gradients"], strict=True):
        assert torch.equal(ours, other)
        assert sqnr_db(exact, ours) > 18.8 and not torch.equal(exact, ours)


@pytest.mark.parametrize("bucket_mb", [25.0, 0.001])
def test_bytes_sent_are_counted_exactly(bucket_mb: float) -> None:
    """Per rank of two: half of the padded codes twice, a float a tensor, two counts; padding of a byte a bucket at most."""
    steps = 3
    [found, _] = steps_of(steps, "e4m3", bucket_mb)
    small = steps * 4 * (TENSORS + 2)
    assert 0 <= found["sent"] - small - steps * PARAMETERS <= steps * TENSORS
    assert found["plain"] == steps * PARAMETERS * 4
    assert (found["sent"] - small) / found["plain"] < 0.2501


def test_bf16_gradients_stay_bf16() -> None:
    [found, other] = steps_of(1, "e4m3", dtype="bfloat16")
    assert found["dtypes"] == {"torch.bfloat16"}
    assert all(torch.equal(a, b) for a, b in zip(found["gradients"], other["gradients"], strict=True))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_on_one_rank_spoils_its_tensor_on_all(value: float) -> None:
    tensors = tensors_of(2)
    clean = mean_of(tensors, 1.0)
    tensors[1][0][3, 4] = value
    for found in mean_of(tensors, 1.0):
        assert found["mean"][0].isnan().all()
        assert all(torch.equal(found["mean"][t], clean[0]["mean"][t]) for t in range(1, TENSORS))
        assert found["mu"] == clean[0]["mu"]


def test_mu_clips_the_largest_and_reaches_further_down() -> None:
    """At mu = 4 the largest come back as a quarter of amax; what is 0 at mu = 1, below its last subnormal, is none at 4."""
    small = 2.0**-11 / 448  # of amax: half of E4M3's last subnormal, to zero at mu = 1
    tensors = [[torch.tensor([1.0, 0.2, small, small]).repeat(8)] for _ in range(2)]
    one, four = (mean_of(tensors, mu)[0]["mean"][0] for mu in (1.0, 4.0))
    assert one[0] == 1 and one[2] == 0
    assert four[0] == pytest.approx(0.25, rel=1e-6) and four[2] > 0 and four[1] == pytest.approx(0.2, rel=2.0**-3)


def test_mu_halves_where_more_than_one_in_a_hundred_thousand_is_clipped_and_doubles_in_a_thousand_steps() -> None:
    mu, total = torch.tensor(8.0), torch.tensor(1e6)
    assert next_mu(mu, torch.tensor(11.0), total) == 4
    grown = mu
    for _ in range(1000):
        grown = next_mu(grown, torch.tensor(10.0), total)
    assert float(grown) == pytest.approx(16.0, rel=1000 * 2.0**-24)
    assert next_mu(torch.tensor(MU_RANGE[0]), torch.tensor(1e6), total) == MU_RANGE[0]
    assert next_mu(torch.tensor(MU_RANGE[1]), torch.tensor(0.0), total) == MU_RANGE[1]


def test_clipping_on_one_rank_halves_mu_on_all() -> None:
    tensors = [[torch.linspace(-1, 1, 1000)], [1e-3 * torch.linspace(-1, 1, 1000)]]
    assert [found["mu"] for found in mean_of(tensors, 2.0)] == [1.0, 1.0]


def test_steps_in_ddp_adapt_mu_alike() -> None:
    [one, other] = steps_of(3, "e4m3")
    once = 2 ** (1 / 1000)  # grown, then back at 1, as one of 2,757 elements is more than 0.001 %, then grown
    assert one["mu"] == other["mu"] == pytest.approx(once, rel=1e-6)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [(nn.Linear(2, 2), {}, "DistributedDataParallel"), (None, {"format": "int8"}, "e4m3")],
)
def test_what_it_cannot_compress_is_refused(model: Any, options: dict[str, Any], message: str) -> None:
    target = (
        model
        if model is not None
        else torch.nn.parallel.DistributedDataParallel.__new__(torch.nn.parallel.DistributedDataParallel)
    )
    with pytest.raises(ValueError, match=message):
        compress_gradients(target, **options)


@pytest.mark.parametrize("mu", [0, -1.0, 0.5, math.inf, math.nan, "1", None])
def test_a_state_without_a_mu_is_refused(mu: object) -> None:
    exchange = GradientExchange(E4M3, None)
    with pytest.raises(ValueError, match="mu="):
        exchange.load_state_dict({"mu": mu})
    exchange.load_state_dict({"mu": 3.0})
    assert exchange.state_dict() == {"mu": 3.0}
