"""Codecs: how a tensor is stored. A pure pair ``encode(x) -> (codes, inv_scale)``, ``decode(codes, inv_scale, ...)``.

    tensorwise   one inv_scale for the tensor
    rowwise      one per row (the last dimension)
    groupwise    one per group of G elements of a row at most (COAT's 1 x G; G = 128), by ``groups.py``

Codes always have the shape of the tensor they stand for, so a decoder needs nothing but codes, scales and a dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fp8compile.numerics.codec_calls import one_call
from fp8compile.numerics.formats import E4M3, INT8, Format
from fp8compile.numerics.groups import Groups, Size
from fp8compile.numerics.scaling import (
    E8M0,
    amax_over,
    amax_rowwise,
    amax_tensorwise,
    dequantize,
    exact_inv_scale,
    in_storage,
    inv_scale_of,
    inv_scale_value,
    quantize,
)

ENCODABLE = (torch.float32, torch.bfloat16, torch.float16)  # encoded dtypes; FP64 is used to be exact


class Codec(Protocol):
    """A storage scheme. ``codes`` is one byte per element; ``inv_scale`` is the metadata, one number per group."""

    @property
    def name(self) -> str:
        """What recipes and reports call it, e.g. ``e4m3 1x128``."""

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``x -> (codes, inv_scale)``, codes in x's shape. A non-finite value leaves a NaN in its inv_scale."""

    def decode(self, codes: Tensor, inv_scale: Tensor, dtype: torch.dtype) -> Tensor:
        """The tensor of ``dtype``, in the shape of ``codes``, that the codes stand for."""


@dataclass(frozen=True)
class Tensorwise:
    """One scale for the whole tensor; inv_scale is 0-d."""

    format: Format = E4M3
    scale_dtype: torch.dtype = torch.float32

    @property
    def name(self) -> str:
        return f"{self.format.name} tensorwise"

    def sizes(self, shape: Sequence[Size]) -> Sequence[Size]:
        return 1, math.prod(shape), math.prod(shape)

    @one_call(encodes=True)
    def encode(self, x: Tensor, amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``amax``, 0-d, spares the pass over x that would find it."""
        if amax is None:
            amax = x.new_zeros(()) if _is_empty(x) else amax_tensorwise(x)
        inv_scale = inv_scale_of(amax, self.format, self.scale_dtype)
        return quantize(x, inv_scale, self.format), inv_scale

    @one_call(encodes=False)
    def decode(self, codes: Tensor, inv_scale: Tensor, dtype: torch.dtype) -> Tensor:
        return dequantize(codes, inv_scale, dtype)


@dataclass(frozen=True)
class Rowwise:
    """One scale per row of the last dimension: inv_scale ``[..., 1]``. A scalar is a row of one."""

    format: Format = E4M3
    scale_dtype: torch.dtype = torch.float32

    @property
    def name(self) -> str:
        return f"{self.format.name} rowwise"

    def sizes(self, shape: Sequence[Size]) -> Sequence[Size]:
        row = shape[-1] if shape else 1
        return math.prod(shape[:-1]), row, row

    @one_call(encodes=True)
    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        inv_scale = self.inv_scale(x)
        return quantize(x, inv_scale, self.format), inv_scale

    def inv_scale(self, x: Tensor) -> Tensor:
        """That of each row, without codes."""
        return inv_scale_of(self._amax(x), self.format, self.scale_dtype)

    @staticmethod
    def _amax(x: Tensor) -> Tensor:
        if _is_empty(x):
            return x.new_zeros((*x.shape[:-1], 1))
        return amax_rowwise(x) if x.dim() else x.abs()

    @one_call(encodes=False)
    def decode(self, codes: Tensor, inv_scale: Tensor, dtype: torch.dtype) -> Tensor:
        return dequantize(codes, inv_scale, dtype)


@dataclass(frozen=True)
class Groupwise:
    """One scale for at most ``group_size`` elements of a row, ``row_dims`` trailing dimensions: inv_scale ``[groups, 1]``."""

    format: Format = E4M3
    group_size: int = 128
    scale_dtype: torch.dtype = torch.bfloat16
    row_dims: int = 1

    @property
    def name(self) -> str:
        return f"{self.format.name} 1x{self.group_size}"

    @property
    def groups(self) -> Groups:
        return Groups(self.group_size, self.row_dims)

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of the codes and scales of a tensor of ``shape``."""
        return math.prod(shape) + self.groups.count(shape) * self.scale_dtype.itemsize

    def sizes(self, shape: Sequence[Size]) -> Sequence[Size]:
        row = self.groups.row(shape)
        return self.groups.rows(shape), row, self.groups.size(row)

    @one_call(encodes=True)
    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        grouped, dims = self.groups.padded(x)
        exact = exact_inv_scale(amax_over(grouped, dims), self.format, self.scale_dtype)
        exact_N1 = exact.reshape(-1, 1)
        # Full groups in the shape of their amaxes: Inductor does not see through a reshape to [N, 1] and back (torch 2.11).
        pair = (grouped, exact) if self.groups.are_full(x.shape) else self.groups.beside(x, exact_N1)
        return quantize(*pair, self.format).reshape(x.shape), in_storage(exact_N1, self.scale_dtype)

    @one_call(encodes=False)
    def decode(self, codes: Tensor, inv_scale: Tensor, dtype: torch.dtype) -> Tensor:
        return dequantize(*self.groups.beside(codes, inv_scale), dtype).reshape(codes.shape)


@dataclass(frozen=True)
class GroupwiseBest:
    """E4M3 or INT8, whichever has the smaller squared error, chosen at run time for each group.

    Both spend one byte per element, so the choice is free in bytes: codes are raw uint8, and a negative inv_scale
    (a scale has no other use for its sign) says that the group is INT8. INT8 wins where a group is Gaussian-like
    (by about 12 dB), E4M3 where it spans decades. In no group is the result worse than with either format alone.
    """

    group_size: int = 128
    scale_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.scale_dtype == E8M0:
            raise ValueError("GroupwiseBest needs a scale with a sign; E8M0 has none")

    @property
    def name(self) -> str:
        return f"best of e4m3|int8 1x{self.group_size}"

    @property
    def groups(self) -> Groups:
        return Groups(self.group_size)

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of the codes and scales of a tensor of ``shape``."""
        return math.prod(shape) + self.groups.count(shape) * self.scale_dtype.itemsize

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        grouped, dims = self.groups.padded(x)
        inv_f, error_f = self._tried(grouped.float(), dims, E4M3)
        inv_i, error_i = self._tried(grouped.float(), dims, INT8)
        inv_scale_N1 = torch.where(error_i < error_f, -inv_i, inv_f).reshape(-1, 1)
        grouped, inv_scale = self.groups.beside(x, inv_scale_N1)
        as_float = quantize(grouped, inv_scale, E4M3).view(torch.uint8)
        as_int = quantize(grouped, -inv_scale, INT8).view(torch.uint8)
        return torch.where(inv_scale < 0, as_int, as_float).reshape(x.shape), inv_scale_N1

    def _tried(self, x: Tensor, dims: tuple[int, ...], fmt: Format) -> tuple[Tensor, Tensor]:
        amax = amax_over(x, dims)
        inv_scale = inv_scale_of(amax, fmt, self.scale_dtype)
        x_hat = quantize(x, inv_scale, fmt).float() * inv_scale_value(inv_scale)
        # In units of amax, so that no square overflows or underflows, whatever the magnitude of the group.
        error = (x_hat - x) * amax.clamp(2.0**-120, 2.0**120).reciprocal()
        return inv_scale, error.square().sum(dims, keepdim=True)

    def decode(self, codes: Tensor, inv_scale: Tensor, dtype: torch.dtype) -> Tensor:
        grouped, inv_scale = self.groups.beside(codes, inv_scale)
        as_float = dequantize(grouped.view(E4M3.dtype), inv_scale, dtype)
        as_int = dequantize(grouped.view(INT8.dtype), -inv_scale, dtype)
        return torch.where(inv_scale < 0, as_int, as_float).reshape(codes.shape)


def _is_empty(x: Tensor) -> bool:
    """Whether there are no elements; False where only a run knows (see ``may_be_empty``). Adds no guard."""
    return isinstance(numel := x.numel(), int) and numel == 0
