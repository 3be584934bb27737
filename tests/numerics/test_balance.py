"""Scales that let several matmuls be one: the identity, the bound, and what is not ordinary."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8compile.numerics import E4M3, E5M2, Format, Tensorwise
from fp8compile.numerics.balance import balanced
from fp8compile.numerics.delayed import quantize_under
from fp8compile.numerics.scaling import SMALLEST_INV_SCALE, dequantize
from tests.support.reference import sqnr_db


def scale(*values: float) -> list[Tensor]:
    return [torch.tensor([[value]]) for value in values]


def largest(weights: list[Tensor]) -> Tensor:
    return torch.cat(weights).amax(0, keepdim=True)


def test_each_gradient_meets_its_weight_under_one_pair_of_scales_and_none_is_clipped_more() -> None:
    gradients, weights = scale(1e-7, 3e-5, 2e-9), scale(1e-3, 2e-4, 5e-1)
    w = largest(weights)
    g, *own = balanced(gradients, weights, w)
    for before, after, weight in zip(gradients, own, weights, strict=True):
        assert torch.allclose(after * weight, g * w, rtol=2**-21, atol=0), "three roundings"
        assert after >= before * (1 - 2**-21)
    tight = min(float(after / before) for before, after in zip(gradients, own, strict=True))
    assert tight == pytest.approx(1, rel=2**-21), "the largest product keeps its scale"


def test_a_weight_of_zeros_makes_no_scale_infinite() -> None:
    weights = [torch.tensor([[SMALLEST_INV_SCALE]]), *scale(3e5)]
    g, *own = balanced(scale(1e5, 1e5), weights, largest(weights))
    assert all(bool(each.isfinite().all()) for each in (g, *own))
    assert own[0] == torch.finfo(torch.float32).max
    codes = quantize_under(torch.randn(4, 4), own[0], E5M2)
    assert not codes.float().any() and not dequantize(codes, own[0], torch.float32).any()


@pytest.mark.parametrize("where", [0, 1])
def test_a_nan_reaches_every_scale(where: int) -> None:
    both = [scale(1.0, 2.0), scale(1.0, 2.0)]
    both[where][1].fill_(torch.nan)
    assert all(bool(each.isnan().all()) for each in balanced(*both, largest(both[1])))


def merged(dys: list[Tensor], ws: list[Tensor], fmt: Format) -> tuple[Tensor, Tensor]:
    """A sum of dgrads as one matmul, and the bound of its error, in float64."""
    codes_w, inv_w = zip(*(Tensorwise(E4M3).encode(w) for w in ws), strict=True)
    inv_w = [each.reshape(1, 1) for each in inv_w]
    inv_dy = [(dy.abs().amax() / fmt.max).reshape(1, 1) for dy in dys]
    w = largest(inv_w)
    g, *own = balanced(inv_dy, inv_w, w)
    left = torch.cat([quantize_under(dy, each, fmt).double() for dy, each in zip(dys, own, strict=True)], 1)
    right = torch.cat([codes.double() for codes in codes_w])
    bound = torch.zeros(dys[0].shape[0], ws[0].shape[1], dtype=torch.float64)
    for dy, weight, each, inv in zip(dys, ws, own, inv_w, strict=True):
        of_dy = torch.maximum(dy.abs().double() * fmt.half_ulp, each.double() * fmt.smallest / 2)
        of_w = torch.maximum(weight.abs().double() * E4M3.half_ulp, inv.double() * E4M3.smallest / 2)
        bound += of_dy @ (weight.abs().double() + of_w) + dy.abs().double() @ of_w
    return (left @ right) * (g * w).double(), bound * (1 + 2.0**-18)


@pytest.mark.parametrize("fmt", [E5M2, E4M3], ids=str)
@pytest.mark.parametrize("ratio", [1.0, 2.0**-8, 2.0**-20])
def test_the_sum_is_as_good_as_with_scales_apart(fmt: Format, ratio: float) -> None:
    """Whatever the ratio of the weights; and within the bound in numerics/balance.py, element by element."""
    generator = torch.Generator().manual_seed(2)
    dys = [torch.randn(64, n, generator=generator) * 1e-4 for n in (48, 32)]
    ws = [torch.randn(n, 64, generator=generator) * size for n, size in ((48, 1.0), (32, ratio))]
    exact = sum(dy.double() @ w.double() for dy, w in zip(dys, ws, strict=True))
    one, bound = merged(dys, ws, fmt)
    apart = sum(merged([dy], [w], fmt)[0] for dy, w in zip(dys, ws, strict=True))
    assert bool(((one - exact).abs() <= bound).all())
    assert sqnr_db(exact, one) > sqnr_db(exact, apart) - 0.1
