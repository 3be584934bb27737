"""less_centre and with_centre: what is taken away is added again, and the error is a share of the distance."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8compile.numerics import INT8, Groupwise
from fp8compile.numerics.centring import LARGEST, SAMPLES, less_centre, with_centre

NAN, INF = float("nan"), float("inf")


def alike(tokens: int = 256, spread: float = 0.01, dtype: torch.dtype = torch.float32) -> Tensor:
    """Two sequences whose tokens are alike up to ``spread``."""
    generator = torch.Generator().manual_seed(tokens)
    common = torch.randn(2, 1, 128, generator=generator)
    return (common + spread * torch.randn(2, tokens, 128, generator=generator)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [1, 33, 64, 127, 1000])
def test_the_centre_is_taken_away_and_added_again(dtype: torch.dtype, tokens: int) -> None:
    x = alike(tokens, dtype=dtype)
    distance, centre = less_centre(x)
    assert distance.dtype == torch.float32 and centre.dtype == torch.bfloat16 and centre.shape == (2, 1, 128)
    assert torch.equal(distance, x.float() - centre.float()), "the centre that is kept is what was taken away"
    off = 2.0**-24 * distance.abs() + torch.finfo(dtype).eps / 2 * x.abs()  # of the subtraction, and of the result
    assert bool(((with_centre(distance, centre, dtype).float() - x.float()).abs() <= off.float()).all())


@pytest.mark.parametrize("tokens", [64, 100, 128, 129, 4096])
def test_the_centre_is_the_mean_of_evenly_spaced_tokens(tokens: int) -> None:
    x = torch.arange(tokens, dtype=torch.float32)[None, :, None].expand(1, tokens, 128)
    _, centre = less_centre(x)
    step = tokens // SAMPLES
    mean = float(x[0, ::step, 0].mean())
    assert abs(float(centre[0, 0, 0]) - mean) <= mean * 2.0**-9
    assert abs(mean - (tokens - 1) / 2) <= step / 2, "in the middle"


@pytest.mark.parametrize("spread", [0.001, 0.1, 10.0])
def test_the_error_is_a_share_of_the_distance(spread: float) -> None:
    x, codec = alike(spread=spread), Groupwise(INT8)
    distance, centre = less_centre(x)
    found = with_centre(codec.decode(*codec.encode(distance), torch.float32), centre, torch.float32)
    largest = distance.abs().amax(-1, keepdim=True)
    off = largest * (1 / 254 + 2.0**-9) + 2.0**-22 * x.abs()  # half a step, a BF16 scale's rounding, FP32's
    assert bool(((found - x).abs() <= off).all())


def test_the_rms_of_the_distance_is_never_far_above_that_of_the_value() -> None:
    x = torch.randn(4, 4096, 128, generator=torch.Generator().manual_seed(0))
    distance, _ = less_centre(x)
    assert float(distance.square().mean()) <= float(x.square().mean()) * (1 + 1.2 / SAMPLES)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_is_not_finite_spoils_its_own_element_alone(bad: float) -> None:
    x = alike(64)
    x[0, 3, 5] = bad
    distance, centre = less_centre(x)
    found = with_centre(distance, centre, torch.float32)
    assert bool(centre.isfinite().all()) and float(centre[0, 0, 5]) == 0
    spoilt = torch.zeros_like(x, dtype=torch.bool)
    spoilt[0, 3, 5] = True
    assert torch.equal(~distance.isfinite(), spoilt) and bool(found[~spoilt].isfinite().all())
    assert bool(found[0, 3, 5].isnan()) == (bad != bad)


def test_the_largest_values_are_no_centre_and_overflow_nowhere() -> None:
    largest = torch.finfo(torch.bfloat16).max
    x = torch.full((1, 64, 2), largest, dtype=torch.bfloat16)
    x[..., 1] = LARGEST / 2
    x[0, 7, 1] = -largest
    distance, centre = less_centre(x)
    assert float(centre[0, 0, 0]) == 0 and bool(distance.isfinite().all())
    assert torch.equal(with_centre(distance, centre, torch.bfloat16), x)
    assert float(with_centre(torch.full((1, 1, 1), 7e4), torch.zeros(1, 1, 1), torch.float16)) == 65504
