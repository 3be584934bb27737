"""The largest step of an optimizer: no gradient gets past the bound, and the worst one gets to it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8compile.numerics import step_bounds
from fp8compile.numerics.formats import E4M3
from fp8compile.numerics.rounding import nearest_bfloat16
from fp8compile.optim.captured_update import CapturedUpdate
from fp8compile.optim.plain_optimizers import PlainLion
from fp8compile.optim.step_bounds import Bound, largest_step, reach, why_no_bound
from tests.support.captured import numbers_of, update_of

ADAM: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
ADAMS = (torch.optim.AdamW, torch.optim.Adam)
RMSPROP: dict[str, Any] = {"lr": 0.1, "alpha": 0.99, "eps": 1e-8, "momentum": 0.9, "weight_decay": 0.0}


Known = tuple[CapturedUpdate, Bound, dict[str, Any]]  # of a group
LION = {name: value for name, value in ADAM.items() if name != "eps"} | {"maximize": False}


def known(kind: type[torch.optim.Optimizer], **options: Any) -> Known:
    p = [torch.nn.Parameter(torch.zeros(4))]
    made = kind(p, options) if kind is PlainLion else kind(p, **options)  # type: ignore[arg-type]
    update = update_of(made)
    assert update.bound is not None
    return update, update.bound, made.param_groups[0]


def moved_and_bound(of: Known, states: dict[str, Tensor], g: Tensor, t: int) -> Tensor:
    """[n, 2]: how far each element of a zero weight moves, and how far its states let it."""
    update, bound, group = of
    n = numbers_of(update, group, t)
    moved = update(torch.zeros_like(g), g, states, n)[0]
    _, most = largest_step(bound, reach(bound, states), n, torch.tensor(float(t)))
    return torch.stack([moved.abs(), most.expand(moved.shape)], -1)


def worst_gradient(m: Tensor, v: Tensor, b1: float, b2: float) -> Tensor:
    """Where Cauchy and Schwarz are equal."""
    return (1 - b1) * b2 * v / ((1 - b2) * b1 * m)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.5, 0.3), (0.95, 0.9999), (0.001, 0.999)], ids=str)
@pytest.mark.parametrize("t", [1, 2, 100, 100_000])
def test_adam_s_step_is_no_larger_than_its_bound_and_as_large(betas: tuple[float, float], t: int) -> None:
    """States over twenty decades that no sequence of gradients could leave, since codes can; and every kind of gradient."""
    generator = torch.Generator().manual_seed(0)
    m = 10 ** (20 * torch.rand(4096, generator=generator) - 12)
    v = m * m * 10 ** (8 * torch.rand(4096, generator=generator) - 4)
    states, of = {"exp_avg": m, "exp_avg_sq": v}, known(torch.optim.AdamW, **ADAM | {"betas": betas})
    worst = worst_gradient(m, v, *betas)
    for factor in (0.0, -1.0, 0.1, 0.9, 1.0, 1.1, 10.0, 1e6):
        moved, bound = moved_and_bound(of, states, factor * worst, t).unbind(-1)
        assert bool((moved <= bound).all()), factor
    large = m > 1e-2  # eps is small beside sqrt(v)
    moved, bound = moved_and_bound(of, states, worst, t).unbind(-1)
    rest = min(1 - b**t for b in betas)
    assert bool((moved / bound)[large].min() > 1 - 4 * step_bounds.ROUNDED - 2 * step_bounds.POWER / rest)


@pytest.mark.parametrize("size", [1e-30, 1e-22, 1e-19, 1e-10, 1.0, 1e18])
def test_it_holds_where_squares_underflow(size: float) -> None:
    """g^2 is 0 in FP32 from 1e-23 on, and m is not: then eps is what is divided by."""
    m, adams = torch.full((64,), size), [known(kind, **ADAM | {"eps": 1e-12}) for kind in ADAMS]
    for v in (torch.zeros(64), m * m):
        for g in (0.0, size, -100 * size):
            for of in adams:
                both = moved_and_bound(of, {"exp_avg": m, "exp_avg_sq": v}, g * torch.ones(64), 3)
                assert bool((both[:, 0] <= both[:, 1]).all()), (v[0], g)


def test_the_worst_sequence_of_gradients_gets_to_the_known_limit() -> None:
    """From zero: g_i ~ (b2 / b1)^i, equality in the sum over all steps. The bound of each step is kept, and the last one is
    7.27, within a hundredth."""
    (b1, b2), steps = ADAM["betas"], 60
    update, bound, group = known(torch.optim.AdamW, **ADAM | {"eps": 1e-12})
    states = {"exp_avg": torch.zeros(1), "exp_avg_sq": torch.zeros(1)}
    late = 20_000  # the corrections of the bias are over
    for i in range(steps):
        n, g = numbers_of(update, group, late + i), torch.tensor([(b2 / b1) ** i])
        _, most = largest_step(bound, reach(bound, states), n, torch.tensor(float(late + i)))
        p, states = update(torch.zeros(1), g, states, n)
        assert float(p.abs()) <= float(most)
    limit = (1 - b1) / math.sqrt(1 - b2) / math.sqrt(1 - b1**2 / b2)
    assert limit == pytest.approx(7.27, abs=0.01)
    assert 0.99 * limit < float(p.abs() / ADAM["lr"]) <= limit * (1 + 1e-3)


def test_lion_and_rmsprop() -> None:
    g, b = torch.tensor([1e20, -1e-20, 0.0, 3.0]), torch.tensor([5.0, -4.0, 0.1, 0.0])
    both = moved_and_bound(known(PlainLion, **LION), {"exp_avg": b}, g, 5)
    assert torch.equal(both[:, 0], torch.full((4,), 0.1)) and bool((both[:, 0] <= both[:, 1]).all())
    for momentum in (0.9, 0.0):
        of = known(torch.optim.RMSprop, **RMSPROP | {"momentum": momentum})
        states = {"square_avg": torch.zeros(4)} | ({"momentum_buffer": b} if momentum else {})
        for sign in (1, -1):
            both = moved_and_bound(of, states, sign * g.clamp_max(1e15), 1)
            assert bool((both[:, 0] <= both[:, 1]).all())
        assert float((both[:, 0] / both[:, 1])[3]) > 0.99, "with no state, 1 / sqrt(1 - alpha) is reached"


@pytest.mark.parametrize(
    ("kind", "group", "has"),
    [
        (torch.optim.AdamW, ADAM, True),
        (torch.optim.AdamW, ADAM | {"betas": (0.9, 0.8)}, False),  # q would grow without end
        (torch.optim.AdamW, ADAM | {"betas": (0.9, 0.99999)}, False),
        (torch.optim.AdamW, ADAM | {"betas": (torch.tensor(0.9), 0.999)}, False),
        (torch.optim.AdamW, ADAM | {"eps": 0.0}, False),
        (PlainLion, ADAM, True),
        (torch.optim.RMSprop, RMSPROP, True),
        (torch.optim.RMSprop, RMSPROP | {"centered": True}, False),
        (torch.optim.RMSprop, RMSPROP | {"alpha": 1.0}, False),
        (torch.optim.SGD, {}, False),
    ],
)
def test_where_there_is_no_bound_it_is_said(
    kind: type[torch.optim.Optimizer], group: dict[str, Any], has: bool
) -> None:
    assert (why_no_bound(kind, {"centered": False} | group) is None) == has


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_bound_holds_what_rounding_adds(dtype: torch.dtype) -> None:
    """The next larger value of the dtype is no further: rounding at random goes there."""
    x = torch.rand(4096) * 10.0 ** torch.linspace(-7, 4, 4096)
    largest = step_bounds.largest_after(x, torch.tensor(-1.0), torch.tensor(0.0), (dtype,))
    near = x.to(dtype)
    above = torch.where(near.float() < x, torch.nextafter(near, torch.tensor(torch.inf, dtype=dtype)), near)
    assert bool((above.float() <= largest).all())


def test_scales_are_the_least_powers_of_two_that_clip_nothing() -> None:
    largest = torch.cat([torch.tensor([448.0, 449.0, 1e-30, 0.0]), 10 ** (30 * torch.rand(1000) - 15)])
    inv_scale = step_bounds.power_of_two_for(largest, E4M3)
    assert torch.equal(inv_scale.log2(), inv_scale.log2().round())
    assert bool((largest <= E4M3.max * inv_scale).all())
    assert bool((largest > E4M3.max * inv_scale / 2)[largest > 0].all())
    for bad in (torch.inf, torch.nan):
        assert bool(step_bounds.power_of_two_for(torch.tensor(bad), E4M3).isnan())


def test_bfloat16_by_integers_is_the_cast() -> None:
    """All upper halves, with lower halves at and beside ties; infinities and NaN among them."""
    high = torch.arange(2**16, dtype=torch.int64)[:, None] << 16
    raw = (high + torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])).to(torch.int32)
    x = raw.view(torch.float32)
    found, cast = nearest_bfloat16(x), x.to(torch.bfloat16).float()
    assert torch.equal(found.isnan(), cast.isnan())
    assert torch.equal(found[~cast.isnan()].view(torch.int32), cast[~cast.isnan()].view(torch.int32))
