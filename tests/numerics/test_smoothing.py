"""Scales of channels: exact powers of two, half of the spread, and no product that changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8compile.numerics import E4M3, Tensorwise
from fp8compile.numerics.scaling import amax_tensorwise
from fp8compile.numerics.smoothing import (
    MOST,
    channel_amax,
    channel_exponents,
    divided,
    multiplied,
    smoothed_amax,
)

NAN, INF = float("nan"), float("inf")
SMALLEST_NORMAL = 2.0**-126


def sample(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def exponents(*amaxes: float) -> list[int]:
    found = channel_exponents(torch.tensor(amaxes))
    assert found.dtype == torch.int32
    return list(found.tolist())


def test_half_of_what_a_channel_is_above_the_others() -> None:
    """The mean exponent is that of most channels; the two large ones are 2**6 and 2**9 above it."""
    assert exponents(*[1.0] * 100, 64.0, 512.0) == [0] * 100 + [3, 4]
    assert exponents(*[1.0] * 100, 2.0, 3.9, 4.0, 0.001) == [0] * 100 + [0, 0, 1, 0]


def test_what_has_no_exponent_has_no_say() -> None:
    """Most channels are zeros: the mean is that of the others, or these would all be far above it."""
    assert exponents(0.0, 0.0, 0.0, 1.0, 1.0, 1.5) == [0] * 6
    assert exponents(INF, NAN, 1e-42, 1.0, 1.0) == [0] * 5
    assert exponents(0.0) == [0] and exponents(NAN, INF) == [0, 0]


def test_never_beyond_the_bound() -> None:
    assert exponents(*[1e-30] * 9, 3e38) == [0] * 9 + [MOST]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_exact_where_the_exponents_have_room(dtype: torch.dtype) -> None:
    """Between the bounds of the module's docstring, back and forth; and the amax is that of what was divided."""
    h = (sample(64, 32) * torch.logspace(-8, 8, 32)).to(dtype)
    e = channel_exponents(channel_amax(h))
    assert int(e.max()) > 0 and torch.equal(multiplied(divided(h, e), e), h)
    assert torch.equal(divided(h, e).double() * 2.0 ** e.double(), h.double())
    assert torch.equal(smoothed_amax(channel_amax(h), e), amax_tensorwise(divided(h, e)))
    edge = torch.full((1,), SMALLEST_NORMAL * 2.0**MOST, dtype=dtype)
    most = torch.full((1,), MOST, dtype=torch.int32)
    assert torch.equal(multiplied(divided(edge, most), most), edge)
    above = torch.full((1,), 2.0 ** (127 - MOST), dtype=dtype)
    assert torch.equal(divided(multiplied(above, most), most), above)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_are_equal_to_the_bit(dtype: torch.dtype) -> None:
    """Each product of two factors is the same number, so each sum is, in whatever order."""
    h, w, g = (
        (sample(48, 32) * torch.logspace(-3, 5, 32)).to(dtype),
        sample(16, 32, seed=1).to(dtype),
        sample(48, 16, seed=2).to(dtype),
    )
    e = channel_exponents(channel_amax(h))
    assert int(e.max()) > 2
    smooth, scaled = divided(h, e), multiplied(w, e)
    assert torch.equal(smooth @ scaled.t(), h @ w.t())
    assert torch.equal(divided(g @ scaled, e), g @ w)
    assert torch.equal(multiplied(g.t() @ smooth, e), g.t() @ h)


def test_not_finite_stays_not_finite() -> None:
    h = sample(8, 4)
    h[0, 0], h[1, 1], h[:, 2] = NAN, INF, h[:, 2] * 1e6
    e = channel_exponents(channel_amax(h))
    assert torch.equal(divided(h, e).isnan(), h.isnan()) and torch.equal(divided(h, e).isinf(), h.isinf())
    codes, inv_scale = Tensorwise(E4M3).encode(divided(h, e), smoothed_amax(channel_amax(h), e))
    assert inv_scale.isnan() and codes.shape == h.shape


def test_codes_lose_what_the_spread_costs_half() -> None:
    """One channel 2**16 times as large: without, the others are E4M3's subnormal numbers."""
    h = sample(256, 64)
    h[:, 3] *= 2.0**16
    e = channel_exponents(channel_amax(h))
    codec = Tensorwise(E4M3)
    plain = codec.decode(*codec.encode(h), h.dtype)
    smooth = multiplied(codec.decode(*codec.encode(divided(h, e)), h.dtype), e)
    others = [i for i in range(64) if i != 3]
    before, after = (float((x - h)[:, others].norm() / h[:, others].norm()) for x in (plain, smooth))
    assert after <= E4M3.half_ulp < before, "the format's bound holds again"
