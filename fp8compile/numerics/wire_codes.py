"""A tensor as the bytes that a link between two ranks carries, and back: 2 to 6, 8 or 16 bits for each element, or as it is.

    2 ... 6    ``FewBits``, dithered: of each group of G elements inv_scale and zero_point, BF16, then the codes
    8          INT8 with one BF16 scale per group, rounded to nearest: the scales, then the codes
    16         FP16 of a tensor in FP16, BF16 of any other
    None       the tensor's own bytes

Metadata stand first. How many bytes there are follows from the shape, so that a receiver knows it without being
told. What is not finite makes its group NaN; in 16 bits and in None it stays what it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8compile.numerics import few_bits
from fp8compile.numerics.codecs import ENCODABLE, Groupwise
from fp8compile.numerics.few_bits import METADATA_BYTES, FewBits
from fp8compile.numerics.formats import INT8

BITS = (*few_bits.BITS, 8, 16, None)


@dataclass(frozen=True)
class WireCode:
    """How a tensor travels.

    Attributes:
        bits: one of ``BITS``.
        group_size: elements of a row per scale at most (``groups.py``); a multiple of 8. Only 2 to 8 bits have scales.
    """

    bits: int | None
    group_size: int = 128

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Bytes of a tensor of ``shape`` and ``dtype``."""
        if self.bits is None:
            return math.prod(shape) * dtype.itemsize
        if self.bits == 16:
            return math.prod(shape) * 2
        return (self._int8() if self.bits == 8 else self._few()).nbytes(shape)

    def packed(self, x: Tensor) -> Tensor:
        """uint8 ``[nbytes]``. x is FP32, BF16 or FP16; in None of any dtype."""
        if self.bits is None:
            return _bytes(x)
        if self.bits == 16:
            return _bytes(x.to(sixteen(x.dtype)))
        if self.bits == 8:
            codes, inv_scale = self._int8().encode(x)
            return torch.cat([_bytes(inv_scale), _bytes(codes)])
        codes, inv_scale, zero_point = self._few().encode(x)
        return torch.cat([_bytes(inv_scale), _bytes(zero_point), codes])

    def unpacked(self, wire: Tensor, shape: Sequence[int], sent: torch.dtype, dtype: torch.dtype) -> Tensor:
        """The tensor of ``shape`` and ``dtype`` that the bytes of one of dtype ``sent`` stand for."""
        if self.bits is None:
            return _read(wire, sent, shape).to(dtype)
        if self.bits == 16:
            return _read(wire, sixteen(sent), shape).to(dtype)
        if self.bits == 8:
            groups = self._int8().groups.count(shape)
            inv_scale = _read(wire[: 2 * groups], torch.bfloat16, (groups, 1))
            return self._int8().decode(wire[2 * groups :].view(torch.int8).reshape(tuple(shape)), inv_scale, dtype)
        groups = self._few().count(shape)
        head = METADATA_BYTES * groups
        inv_scale, zero_point = _read(wire[:head], torch.bfloat16, (2, groups, 1)).unbind()
        return self._few().decode(wire[head:], inv_scale, zero_point, shape, dtype)

    def _few(self) -> FewBits:
        assert self.bits is not None
        return FewBits(self.bits, self.group_size)

    def _int8(self) -> Groupwise:
        return Groupwise(INT8, self.group_size)


def sixteen(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a tensor of ``dtype`` is kept in two bytes."""
    return torch.float16 if dtype == torch.float16 else torch.bfloat16


def can_be_coded(dtype: torch.dtype) -> bool:
    """Whether a tensor of ``dtype`` may travel in fewer bits than its own."""
    return dtype in ENCODABLE


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def _read(wire: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """A copy: a view of another dtype must begin at a multiple of its size."""
    return wire.clone().view(dtype).reshape(tuple(shape))
