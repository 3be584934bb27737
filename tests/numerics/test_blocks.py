"""Blocks of a matrix: every BF16 input, short blocks, what is in a block and what is not, the rule of MXFP8's exponent."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fp8compile.numerics import E4M3, E5M2, Blocks, Format, Rowwise
from fp8compile.numerics.blocks import MX_BLOCK
from tests.support.reference import (
    E8M0,
    bits_equal,
    finite_values,
    non_finite_values,
    raw,
    reference_codes,
    reference_scale,
    round_trip_bound,
)

torch.set_num_threads(1)

FP32 = torch.float32
CODECS = [
    *(Blocks(fmt, *block) for fmt in (E4M3, E5M2) for block in ((1, 128), (128, 1), (128, 128))),
    *(Blocks(fmt, *block, E8M0) for fmt in (E4M3, E5M2) for block in ((1, MX_BLOCK), (MX_BLOCK, 1))),
]
SHAPES = [(1, 1), (128, 128), (256, 384), (16, 48), (129, 127), (300, 144), (40, 16)]

by_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)


def normal(*shape: int, seed: int = 0) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x * torch.logspace(-3, 3, shape[1])  # so that no two blocks are alike


def decoded(codec: Blocks, x: Tensor) -> Tensor:
    return codec.decode(*codec.encode(x), FP32)


def scale_of_each(codec: Blocks, inv_scale: Tensor, x: Tensor) -> Tensor:
    """By indices, in float64."""
    i, j = (torch.arange(size) // block for size, block in zip(x.shape, (codec.rows, codec.columns), strict=True))
    return reference_scale(inv_scale)[i][:, j]


def every_value(codec: Blocks, amax: float) -> Tensor:
    """Every finite BF16 value up to ``amax``, each in a block of its own beside that amax; zeros fill the blocks."""
    x = finite_values(torch.bfloat16)
    x = x[x.abs().float() <= amax]
    lines = torch.zeros(len(x), codec.rows * codec.columns, dtype=x.dtype)
    lines[:, 0], lines[:, -1] = x, amax
    blocks = lines.reshape(-1, codec.rows, codec.columns)
    return blocks.transpose(0, 1).reshape(codec.rows, -1) if codec.rows == 1 else blocks.reshape(-1, codec.columns)


# ------------------------------------------------------------------------------------------------- every input


@pytest.mark.parametrize("amax", [torch.finfo(torch.bfloat16).max, 2.953125, 2.0**-126])
@pytest.mark.parametrize("block", [(1, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("scale_dtype", [FP32, E8M0], ids=str)
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_every_bf16_value_is_rounded_as_ml_dtypes_does_within_the_bound(
    fmt: Format, scale_dtype: torch.dtype, block: tuple[int, int], amax: float
) -> None:
    codec = Blocks(fmt, *block, scale_dtype)
    x = every_value(codec, amax)
    codes, inv_scale = codec.encode(x)
    scale = scale_of_each(codec, inv_scale, x)
    assert torch.equal(raw(codes), reference_codes(x, scale, fmt))
    x_hat = codec.decode(codes, inv_scale, FP32).double()
    bound = round_trip_bound(x.double(), x_hat, scale, fmt)
    assert ((x_hat - x.double()).abs() <= bound).all()
    assert not decoded(codec, x)[x == 0].any(), "zeros are exact"


@by_codec
def test_the_bound_in_the_docstring_holds_for_blocks_of_full_size(codec: Blocks) -> None:
    x = normal(300, 300)
    codes, inv_scale = codec.encode(x)
    scale = scale_of_each(codec, inv_scale, x)
    step = scale * (codec.format.smallest / 2)
    error = (codec.decode(codes, inv_scale, FP32).double() - x.double()).abs()
    assert (error <= torch.maximum(x.double().abs() * codec.format.half_ulp, step) + 2.0**-22 * x.abs()).all()
    amax = scale_of_each(codec, codec._amax(x), x)
    largest = (2 if codec.scale_dtype == E8M0 else 1) * amax / codec.format.max
    assert (scale <= largest * (1 + 2.0**-22)).all() and (scale >= amax / codec.format.max * (1 - 2.0**-22)).all()


@pytest.mark.parametrize("value", [*non_finite_values(torch.bfloat16)[::16].tolist(), math.inf, -math.inf])
@by_codec
def test_a_value_that_is_not_finite_spoils_its_block_and_no_other(codec: Blocks, value: float) -> None:
    x = normal(300, 144)
    x[130, 140] = value
    x_hat = decoded(codec, x)
    i, j = 130 // codec.rows * codec.rows, 140 // codec.columns * codec.columns
    inside = torch.zeros_like(x, dtype=torch.bool)
    inside[i : i + codec.rows, j : j + codec.columns] = True
    assert x_hat[inside].isnan().all() and x_hat[~inside].isfinite().all()


@pytest.mark.parametrize("zero", [0.0, -0.0])
@by_codec
def test_blocks_of_zeros_come_back_as_exact_zeros(codec: Blocks, zero: float) -> None:
    codes, inv_scale = codec.encode(torch.full((40, 144), zero))
    assert torch.equal(codec.decode(codes, inv_scale, FP32), torch.zeros(40, 144))
    assert (reference_scale(inv_scale) == 2.0**-126).all()


# -------------------------------------------------------------------------------------------- blocks and tails


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@by_codec
def test_a_short_block_has_the_codes_of_one_filled_up_with_zeros(codec: Blocks, shape: tuple[int, int]) -> None:
    x = normal(*shape)
    R, C = shape
    padded = torch.zeros(R + -R % codec.rows, C + -C % codec.columns)
    padded[:R, :C] = x
    codes, inv_scale = codec.encode(x)
    of_padded, its_scale = codec.encode(padded)
    assert codes.shape == x.shape and inv_scale.shape == (-(-R // codec.rows), -(-C // codec.columns))
    assert torch.equal(raw(codes), raw(of_padded)[:R, :C]) and bits_equal(inv_scale, its_scale)
    assert torch.equal(codec.decode(codes, inv_scale, FP32), codec.decode(of_padded, its_scale, FP32)[:R, :C])


@pytest.mark.parametrize("scale_dtype", [FP32, E8M0], ids=str)
def test_a_block_of_the_transpose_is_the_transposed_block(scale_dtype: torch.dtype) -> None:
    x = normal(300, 144)
    for block in ((1, 128), (128, 128), (32, 1)):
        codec, across = Blocks(E4M3, *block, scale_dtype), Blocks(E4M3, *block[::-1], scale_dtype)
        assert torch.equal(decoded(codec, x).t(), decoded(across, x.t()))


def test_a_block_as_long_as_a_row_is_that_row() -> None:
    x = normal(40, 128)
    assert torch.equal(decoded(Blocks(), x), Rowwise().decode(*Rowwise().encode(x), FP32))


def test_an_outlier_costs_its_own_block_alone() -> None:
    x = normal(1, 256)
    spoiled = x.clone()
    spoiled[0, 0] = 1e6
    assert torch.equal(decoded(Blocks(), x)[0, 128:], decoded(Blocks(), spoiled)[0, 128:])
    assert not torch.equal(decoded(Blocks(), x)[0, 1:128], decoded(Blocks(), spoiled)[0, 1:128])


# --------------------------------------------------------------------------------------------- MXFP8's exponent


def test_the_shared_exponent_is_rounded_up_so_that_nothing_saturates() -> None:
    """OCP's floor(log2(amax)) - 8 would clip 1.75 to 2 times a power of two at 448 times the scale."""
    mx = Blocks(E4M3, 1, MX_BLOCK, E8M0)
    for amax, exponent in ((448.0, 0), (448.0001, 1), (511.0, 1), (512.0, 1), (896.0, 1), (1.0, -8), (1.76, -7)):
        x = torch.full((1, MX_BLOCK), amax)
        codes, inv_scale = mx.encode(x)
        assert int(inv_scale) == 127 + exponent, amax
        assert (codes.float().abs() <= 448).all()
        assert abs(float(mx.decode(codes, inv_scale, FP32)[0, 0]) - amax) <= amax / 16
    assert inv_scale.dtype == torch.uint8 and math.frexp(float(reference_scale(inv_scale)))[0] == 0.5


# -------------------------------------------------------------------------------------------------- compiled


@pytest.mark.parametrize("shape", [(256, 384), (300, 144), (40, 48)], ids=str)
def test_compiled_blocks_are_bit_equal_to_eager_ones(shape: tuple[int, int]) -> None:
    torch._dynamo.reset()
    x = normal(*shape).bfloat16()
    codecs = [CODECS[0], CODECS[1], CODECS[2], CODECS[6], CODECS[7]]

    def round_trips(x: Tensor) -> list[Tensor]:
        found = []
        for codec in codecs:
            codes, inv_scale = codec.encode(x)
            found += [codes, inv_scale, codec.decode(codes, inv_scale, x.dtype)]
        return found

    for ours, eager in zip(torch.compile(round_trips, fullgraph=True)(x), round_trips(x), strict=True):
        assert bits_equal(ours, eager)
