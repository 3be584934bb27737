"""Tensors as bytes: what comes back is what the codecs decode, in as many bytes as were told beforehand."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from fp8compile.numerics import few_bits
from fp8compile.numerics.codecs import Groupwise
from fp8compile.numerics.few_bits import FewBits
from fp8compile.numerics.formats import INT8
from fp8compile.numerics.wire_codes import BITS, WireCode, can_be_coded, sixteen
from tests.support.reference import bits_equal

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((1,), (7, 3), (2, 128), (5, 3, 43), (4, 192))
every_code = pytest.mark.parametrize("bits", BITS, ids=str)


def values(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def through(code: WireCode, x: Tensor) -> Tensor:
    return code.unpacked(code.packed(x), x.shape, x.dtype, x.dtype)


@every_code
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_are_as_many_as_told(bits: int | None, dtype: torch.dtype) -> None:
    for shape, group_size in itertools.product(SHAPES, (8, 128)):
        wire = WireCode(bits, group_size).packed(values(shape, dtype))
        assert wire.dtype == torch.uint8 and wire.dim() == 1
        assert len(wire) == WireCode(bits, group_size).nbytes(shape, dtype)


def test_full_groups_take_their_bits_and_four_bytes() -> None:
    assert [WireCode(bits).nbytes((1280,), torch.float32) for bits in (2, 3, 4, 5, 6)] == [
        bits * 160 + 40 for bits in (2, 3, 4, 5, 6)
    ]
    assert WireCode(8).nbytes((1280,), torch.float32) == 1280 + 20
    assert (WireCode(16).nbytes((10,), torch.float32), WireCode(None).nbytes((10,), torch.float32)) == (20, 40)


@pytest.mark.parametrize("bits", few_bits.BITS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_few_bits_come_back_as_their_codec_decodes_them(bits: int, dtype: torch.dtype) -> None:
    for shape, group_size in itertools.product(SHAPES, (8, 128)):
        x, codec = values(shape, dtype), FewBits(bits, group_size)
        assert bits_equal(through(WireCode(bits, group_size), x), codec.decode(*codec.encode(x), shape, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_eight_bits_are_int8_in_groups(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        x, codec = values(shape, dtype), Groupwise(INT8, 128)
        assert bits_equal(through(WireCode(8), x), codec.decode(*codec.encode(x), dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sixteen_bits_are_one_rounding_and_none_is_exact(dtype: torch.dtype) -> None:
    x = values((3, 5), dtype)
    assert bits_equal(through(WireCode(16), x), x.to(sixteen(dtype)).to(dtype))
    assert bits_equal(through(WireCode(None), x), x)
    assert sixteen(dtype) == (torch.float16 if dtype == torch.float16 else torch.bfloat16)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_arrives(value: float) -> None:
    x = torch.ones(2, 128)
    x[1, 3] = value
    for bits in BITS:
        found = through(WireCode(bits), x)
        assert torch.equal(found[0], through(WireCode(bits), torch.ones(2, 128))[0]), bits
        assert not found[1, 3].isfinite() and (bits in (16, None) or found[1].isnan().all()), bits


def test_a_tensor_that_is_not_contiguous_keeps_its_order() -> None:
    x = torch.arange(48.0).reshape(6, 8).T
    assert torch.equal(through(WireCode(None), x), x)


def test_what_may_be_coded() -> None:
    assert all(can_be_coded(dtype) for dtype in DTYPES)
    assert not any(can_be_coded(dtype) for dtype in (torch.float64, torch.int64, torch.bool, torch.complex64))
