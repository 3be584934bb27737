"""Codecs: how a tensor is stored. A pure pair ``encode(x) -> (codes, inv_scale)``, ``decode(codes, inv_scale, ...)``.

    tensorwise   one inv_scale for the tensor
    rowwise      one per row (the last dimension)
    groupwise    one per G elements in contiguous order (COAT's 1 x G; G = 128), the last group short if it must be

Codes always have the shape of the tensor they stand for, so a decoder needs nothing but codes, scales and a dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8compile.numerics.formats import E4M3, INT8, Format
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

ALONG_ROWS = torch.__version__ >= "2.15"  # for ``_full_groups``
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

    def encode(self, x: Tensor, amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``amax``, 0-d, spares the pass over x that would find it."""
        if amax is None:
            amax = x.new_zeros(()) if _is_empty(x) else amax_tensorwise(x)
        inv_scale = inv_scale_of(amax, self.format, self.scale_dtype)
        return quantize(x, inv_scale, self.format), inv_scale

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

    def decode(self, codes: Tensor, inv_scale: Tensor, dtype: torch.dtype) -> Tensor:
        return dequantize(codes, inv_scale, dtype)


@dataclass(frozen=True)
class Groupwise:
    """One scale per ``group_size`` elements in contiguous order: inv_scale ``[ceil(numel / G), 1]``.

    Where G does not divide the number of elements the last group is short: its scale sees only its own elements. (With
    a symbolic number of elements, the last group of each row of the last dimension is short.)
    """

    format: Format = E4M3
    group_size: int = 128
    scale_dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        return f"{self.format.name} 1x{self.group_size}"

    def nbytes(self, numel: int) -> int:
        """Bytes of the codes and scales of so many elements."""
        return numel + -(-numel // self.group_size) * self.scale_dtype.itemsize

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        grouped, dims = padded_to_groups(x, self.group_size)
        exact_N1 = exact_inv_scale(amax_over(grouped, dims), self.format, self.scale_dtype).reshape(-1, 1)
        codes = quantize(*by_groups(x, exact_N1, self.group_size), self.format)
        return codes.reshape(x.shape), in_storage(exact_N1, self.scale_dtype)

    def decode(self, codes: Tensor, inv_scale: Tensor, dtype: torch.dtype) -> Tensor:
        return dequantize(*by_groups(codes, inv_scale, self.group_size), dtype).reshape(codes.shape)


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

    def nbytes(self, numel: int) -> int:
        """Bytes of the codes and scales of so many elements."""
        return numel + -(-numel // self.group_size) * self.scale_dtype.itemsize

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        grouped, dims = padded_to_groups(x, self.group_size)
        inv_f, error_f = self._tried(grouped.float(), dims, E4M3)
        inv_i, error_i = self._tried(grouped.float(), dims, INT8)
        inv_scale_N1 = torch.where(error_i < error_f, -inv_i, inv_f).reshape(-1, 1)
        grouped, inv_scale = by_groups(x, inv_scale_N1, self.group_size)
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
        grouped, inv_scale = by_groups(codes, inv_scale, self.group_size)
        as_float = dequantize(grouped.view(E4M3.dtype), inv_scale, dtype)
        as_int = dequantize(grouped.view(INT8.dtype), -inv_scale, dtype)
        return torch.where(inv_scale < 0, as_int, as_float).reshape(codes.shape)


def _is_empty(x: Tensor) -> bool:
    """Whether there are no elements; False where only a run knows (see ``may_be_empty``). Adds no guard."""
    return isinstance(numel := x.numel(), int) and numel == 0


def _divides(group_size: int, numel: int | torch.SymInt) -> bool:
    """Whether every group is full, as far as can be told without guarding on a symbolic shape."""
    return statically_known_true(numel % group_size == 0)


def _lines(x: Tensor) -> Tensor:
    """``x`` as ``[R, L]`` where each line ends in a short group: one line, or, for a symbolic shape, one per row.

    With a symbolic number of elements the length of a single tail would be symbolic too, and 0 for some sizes. That would be
    a guard, and so a recompilation. Rows of a fixed length have tails of a fixed length.
    """
    if x.dim() and isinstance(x.numel(), torch.SymInt) and isinstance(x.shape[-1], int):
        return x.reshape(-1, x.shape[-1])
    return x.reshape(1, -1)


def padded_to_groups(x: Tensor, group_size: int) -> tuple[Tensor, tuple[int, ...]]:
    """``x`` in contiguous order with its groups as trailing dimensions, and the indices of these; short groups are padded."""
    if _divides(group_size, x.numel()):
        return _full_groups(x, group_size)
    lines = _lines(x)
    x = torch.nn.functional.pad(lines, (0, (-lines.shape[1]) % group_size))
    return x.reshape(x.numel() // group_size, group_size), (-1,)


def in_groups(x: Tensor, group_size: int) -> Tensor:
    """``x [..., C]`` as its groups ``[..., group_size]``, in the shape in which they are encoded; group_size divides C."""
    return _full_groups(x, group_size)[0]


def _full_groups(x: Tensor, group_size: int) -> tuple[Tensor, tuple[int, ...]]:
    """``x`` with its groups as trailing dimensions, and these: ``[..., C / G, G]``, or ``[..., G / 64, 64]`` for heads of 64.

    ``[N, G]`` has the same order, but not x's rows. A norm along a row and the amaxes of the row's groups are one kernel only
    if the groups are a part of the row; that takes nested reductions, so torch 2.15. Before, ``[N, G]`` is as good or better:
    of ``[..., C / G, G]`` torch 2.11 makes no codes in the kernel that makes a layer's values, and torch 2.13 not where it
    counts them too (tests/sm90). Where several dimensions make up a group Inductor does not see that ``[N, G]`` and x's shape
    are views of each other, and copies the codes once more (torch 2.13, convert_to_reinterpret_view).
    """
    inner = 1
    for k in range(1, x.dim() + 1):
        size, left = x.shape[-k], group_size // inner
        if statically_known_true(size % left == 0):
            if k == 1 and not ALONG_ROWS:
                break
            grouped = x.reshape(*x.shape[:-k], size // left, left, *x.shape[x.dim() - k + 1 :])
            return grouped, tuple(range(-k, 0))
        if not (isinstance(size, int) and 0 < size < left and left % size == 0):
            break
        inner *= size
    return x.reshape(x.numel() // group_size, group_size), (-1,)


def by_groups(x: Tensor, inv_scale_N1: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """``x`` and its scales in shapes that broadcast: trailing groups, or, where tails are short, both ``[R, L]``.

    The latter handles full groups and tails separately. Indexing by ``i // G`` over a length that G does not divide is
    shorter, but Inductor's C++ backend then splits the loop at G and drops the tail (torch 2.13, try_loop_split).
    """
    if _divides(group_size, x.numel()):
        grouped, dims = _full_groups(x, group_size)
        return grouped, inv_scale_N1.reshape(*grouped.shape[: -len(dims)], *[1] * len(dims))
    x_RL = _lines(x)
    rows, length = x_RL.shape
    full, tail = length // group_size, length % group_size
    # -1 twice, and not `full + 1` and `full:`, because the length may be symbolic: nothing proves that there are full + 1
    # groups, and Inductor reads past the end when it expands a dimension that it does not know to be 1.
    groups = -(-length // group_size) if isinstance(length, int) else -1  # with no rows, -1 is ambiguous
    inv_scale = inv_scale_N1.reshape(rows, groups)
    in_full_groups = inv_scale[:, :full, None].expand(rows, full, group_size).reshape(rows, full * group_size)
    return x_RL, torch.cat([in_full_groups, inv_scale[:, -1:].expand(rows, tail)], 1)
