"""Codes about a centre: never a larger error than without one, and a share of the distance where that is small."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8compile.numerics import INT8, Groupwise
from fp8compile.numerics.centring import LARGEST, SAMPLES, centre_of, decode_about_centre, encode_about_centre
from fp8compile.numerics.groups import Groups

NAN, INF = float("nan"), float("inf")
CHANNELS, CODEC = 128, Groupwise(INT8)


def alike(tokens: int = 256, spread: float = 0.01, dtype: torch.dtype = torch.float32) -> Tensor:
    """Two sequences whose tokens are alike up to ``spread``."""
    generator = torch.Generator().manual_seed(tokens)
    common = torch.randn(2, 1, CHANNELS, generator=generator)
    return (common + spread * torch.randn(2, tokens, CHANNELS, generator=generator)).to(dtype)


def around(x: Tensor, codec: Groupwise = CODEC) -> tuple[Tensor, Tensor, Tensor]:
    """What comes back, the scales, and the centre."""
    sizes = (x.shape[1], x.shape[2])
    codes, inv_scale, centre = encode_about_centre(x, sizes, codec)
    assert codes.dtype == torch.int8 and codes.shape == x.shape and centre.dtype == torch.bfloat16
    return decode_about_centre(codes, inv_scale, centre, sizes, codec, x.dtype), inv_scale, centre


@pytest.mark.parametrize("tokens", [64, 100, 128, 129, 4096])
def test_the_centre_is_the_mean_of_evenly_spaced_tokens_in_bf16(tokens: int) -> None:
    x = torch.arange(tokens, dtype=torch.float32)[None, :, None].expand(1, tokens, CHANNELS)
    centre = centre_of(x)
    step = tokens // SAMPLES
    mean = float(x[0, ::step, 0].mean())
    assert torch.equal(centre, centre.bfloat16().float()), "what is subtracted is what is kept"
    assert abs(float(centre[0, 0, 0]) - mean) <= mean * 2.0**-8
    assert abs(mean - (tokens - 1) / 2) <= step / 2, "in the middle"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("group_size", [64, 96, 128])
@pytest.mark.parametrize("spread", [0.001, 0.1, 0.4, 10.0])
def test_the_error_is_a_share_of_the_smaller_of_two(spread: float, group_size: int, dtype: torch.dtype) -> None:
    x, group_size = alike(66, spread, dtype), Groups(group_size).size(CHANNELS)
    found, inv_scale, centre = around(x, Groupwise(INT8, group_size))
    step = inv_scale.float().abs().repeat_interleave(group_size)[: x.numel()].view(x.shape)
    off = step * 0.5 + (2.0**-22 + torch.finfo(dtype).eps / 2) * (
        x.float().abs() + step
    )  # half a step, FP32, the dtype
    # A scale that BF16 rounded down saturates the largest element: 127 steps of it, off by 2^-9.
    assert bool(((found.float() - x.float()).abs() <= off + step * 127 * 2.0**-9).all())
    groups = [each for each in x.float().flatten().split(group_size)]
    near = [each for each in (x.float() - centre.float()).flatten().split(group_size)]
    for one, other, scale in zip(groups, near, inv_scale.flatten().float(), strict=True):
        smaller = other.abs().amax() < one.abs().amax() / 2
        amax = float((other if smaller else one).abs().amax())
        assert bool(scale < 0) == bool(smaller) and abs(float(scale)) == pytest.approx(amax / 127, rel=2.0**-8)


def test_without_a_reason_for_a_centre_codes_are_as_without_one() -> None:
    x = torch.randn(2, 64, CHANNELS, generator=torch.Generator().manual_seed(0))
    codes, inv_scale, _ = encode_about_centre(x, (64, CHANNELS), CODEC)
    plain, scale = CODEC.encode(x)
    assert torch.equal(codes, plain) and torch.equal(inv_scale, scale)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("spread", [0.01, 10.0])
def test_what_is_not_finite_spoils_its_own_group_alone(bad: float, spread: float) -> None:
    x = alike(64, spread)
    x[0, 3, 5] = bad
    found, _, centre = around(x)
    assert bool(centre.isfinite().all()) and float(centre[0, 0, 5]) == 0
    spoilt = torch.zeros_like(x, dtype=torch.bool)
    spoilt[0, 3] = True
    assert torch.equal(found.isnan(), spoilt) and bool(found[~spoilt].isfinite().all())


def test_the_largest_values_are_no_centre_and_overflow_nowhere() -> None:
    largest = torch.finfo(torch.bfloat16).max
    x = torch.full((1, 64, CHANNELS), largest, dtype=torch.bfloat16)
    x[..., 1:] = LARGEST / 2
    found, _, centre = around(x)
    assert float(centre[0, 0, 0]) == 0 and bool(found.isfinite().all())
    close = torch.full((1, 64, CHANNELS), 65504.0, dtype=torch.float16) - 32 * (torch.arange(64) % 2)[None, :, None]
    found, inv_scale, _ = around(close.half())
    assert bool((inv_scale < 0).all()) and bool(found.isfinite().all()), "saturates"


def test_zeros_stay_zeros() -> None:
    found, _, centre = around(torch.zeros(1, 64, CHANNELS))
    assert not found.any() and not centre.any()
