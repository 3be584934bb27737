"""The operators of codecs that a GPU has short forms of: here they are torch's own functions; the forms are right in FP32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fp8compile.fx.code_lowerings import TO_INTEGER, as_ptx
from fp8compile.numerics import code_forms
from fp8compile.numerics.formats import E4M3, E5M2, INT8, Format
from fp8compile.numerics.scaling import exact_inv_scale, quantize

SPECIAL = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, -1e-45, 3.4e38, -3.4e38])


def all_bfloat16() -> Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16).float()


@pytest.mark.parametrize("limit", [448.0, 57344.0, 127.0, torch.finfo(torch.bfloat16).max])
def test_within_is_clamp(limit: float) -> None:
    x = torch.cat([all_bfloat16(), SPECIAL])
    assert torch.equal(code_forms.WITHIN(x, limit).view(torch.int32), x.clamp(-limit, limit).view(torch.int32))


@pytest.mark.parametrize("fmt", [E4M3, E5M2, INT8], ids=lambda fmt: fmt.name)
def test_codes_are_quantize_s(fmt: Format) -> None:
    x = all_bfloat16()
    x = x if fmt.is_float else x[~x.isnan()]  # a NaN has no code in INT8
    codes = quantize(x, torch.ones(()), fmt)
    assert torch.equal(code_forms.CODES_OF(x, fmt.dtype).view(torch.uint8), codes.view(torch.uint8))


def test_the_last_byte_of_a_sum_is_the_nearest_integer_ties_to_even() -> None:
    """Every number that FP32 has between 64 and 128, all with steps of 2**-13 below, and the ties."""
    fine = torch.arange(-128 * 2**13, 128 * 2**13 + 1).float() * 2.0**-13
    top = torch.arange(2**23, dtype=torch.int32) + (133 << 23)  # the bits of [64, 128)
    for x in (fine, top.view(torch.float32), -top.view(torch.float32)):
        held = x.clamp(-127, 127)
        found = ((held + TO_INTEGER).view(torch.int32) & 255).to(torch.uint8).view(torch.int8)
        assert torch.equal(found, held.round().to(torch.int8))


def test_magnitudes_are_ordered_as_their_bits() -> None:
    x = torch.cat([all_bfloat16(), SPECIAL])
    bits = code_forms.MAGNITUDE_BITS(x)
    assert bits.dtype is torch.int32 and (bits >= 0).all()
    finite = x.abs()[~x.isnan()]
    assert torch.equal(finite.sort().values, code_forms.MAGNITUDES(bits[~x.isnan()].sort().values, torch.float32))
    assert (bits[x.isnan()] > bits[~x.isnan()].max()).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_bits_are_the_largest_magnitude(dtype: torch.dtype) -> None:
    x = (torch.randn(64, 40) * torch.logspace(-6, 4, 40)).to(dtype)
    x[3, 5], x[4, 6], x[4, 7] = torch.nan, -torch.inf, torch.nan
    x[5, 8] = -torch.inf
    found = code_forms.MAGNITUDES(code_forms.MAGNITUDE_BITS(x).amax(1), dtype)
    assert found.dtype is dtype and torch.equal(found.nan_to_num(-1.0), x.abs().amax(1).nan_to_num(-1.0))


@pytest.mark.parametrize(
    ("number", "text"), [(127.0, "0f42FE0000"), (-127.0, "0fC2FE0000"), (TO_INTEGER, "0f4B400000")]
)
def test_numbers_are_written_for_ptx(number: float, text: str) -> None:
    assert as_ptx(number) == text


@pytest.mark.parametrize("scale", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fmt", [E4M3, E5M2, INT8], ids=lambda fmt: fmt.name)
def test_scales_and_codes_of_one_node_are_those_of_scaling(fmt: Format, scale: torch.dtype) -> None:
    """Of every amax that BF16 has, NaN and infinity too: as the operator is, and as Inductor generates it here."""

    def both(amax: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        inv_scale: Tensor = code_forms.INV_SCALE(amax, fmt.dtype, scale)
        return inv_scale, code_forms.QUANTIZED(x, inv_scale, fmt.dtype)

    amax = all_bfloat16().abs().reshape(-1, 1)
    x = amax * torch.linspace(-1, 1, 4)
    expected = exact_inv_scale(amax, fmt, scale)
    known = ~expected.isnan().expand_as(x)  # a NaN has no code in INT8
    for run in (both, torch.compile(both)):
        inv_scale, codes = run(amax, x)
        assert torch.equal(inv_scale.nan_to_num(-1.0), expected.nan_to_num(-1.0))
        assert torch.equal(codes[known].view(torch.uint8), quantize(x, expected, fmt)[known].view(torch.uint8))


def test_values_that_are_not_computed_are_as_those_that_are() -> None:
    x = torch.randn(6, 4).t()
    bits = code_forms.MAGNITUDE_BITS(x)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (code_forms.WITHIN, (x, 1.0)),
        (code_forms.CODES_OF, (x, torch.int8)),
        (code_forms.MAGNITUDE_BITS, (x.bfloat16(),)),
        (code_forms.MAGNITUDES, (bits, torch.bfloat16)),
        (code_forms.INV_SCALE, (x.bfloat16(), torch.int8, torch.bfloat16)),
        (code_forms.QUANTIZED, (x, torch.ones(()), torch.float8_e4m3fn)),
    ]
    for operator, arguments in calls:
        found = operator(*(a.to("meta") if isinstance(a, Tensor) else a for a in arguments))
        real = operator(*arguments)
        assert (found.shape, found.stride(), found.dtype) == (real.shape, real.stride(), real.dtype), operator
