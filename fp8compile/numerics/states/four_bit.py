"""Four-bit states (Li et al. 2023, "Memory Efficient Optimizers with 4-bit States"), two codes to a byte.

    dynamic4        m    sign and 3 bits of the dynamic tree, times the group's amax
    linear4         v    (i + 1) / 16 * amax,  i = 0 ... 15
    rank1_linear4   v    the same with an amax for each element: min(amax of its row, amax of its column)

The codebook of v has *no zero*: v rounded to 0 makes 1 / sqrt(v) explode, which is what made 4-bit states fail before. So an
exact 0 decodes to amax / 16 where its group (row and column) holds a value above 0, and to 0 where it does not. A value that
would decode to less than 2**-126 decodes to 2**-126. No two rows share a byte; an odd row's last high half is 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from fp8compile.numerics.states.dither import dithered
from fp8compile.numerics.states.dynamic_tree import decode_tree, encode_tree
from fp8compile.numerics.states.interface import GROUP, SMALLEST, Grouped, rows_of, unit_and_amax

LEVELS = 16


def packed(codes: Tensor, rows: tuple[int, ...], length: int) -> Tensor:
    """Codes 0 ... 15 of rows of ``length`` elements, two to a byte, the earlier one low: ``[*rows, ceil(length / 2)]``."""
    codes_RL = codes.to(torch.int32).reshape(math.prod(rows), length)
    pairs = torch.nn.functional.pad(codes_RL, (0, length % 2)).reshape(*rows, (length + 1) // 2, 2) & 15
    return (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8)


def unpacked(code_bytes: Tensor, rows: tuple[int, ...], length: int) -> Tensor:
    """The inverse of ``packed``: codes ``[*rows, length]``, uint8."""
    shifts = torch.arange(0, 8, 4, device=code_bytes.device, dtype=torch.int32)
    pairs = code_bytes.to(torch.int32).unsqueeze(-1) >> shifts & 15
    return pairs.reshape(*rows, (length + 1) // 2 * 2)[..., :length].to(torch.uint8)


def linear_codes(unit: Tensor, x: Tensor, dithers: bool) -> Tensor:
    """i such that (i + 1) / 16 is nearest to ``unit`` in [0, 1], or, dithered by x, unbiased."""
    steps = unit * LEVELS
    return ((dithered(steps, x) if dithers else steps.round()) - 1).clamp(0, LEVELS - 1)


def linear_values(codes: Tensor, scale: Tensor) -> Tensor:
    """``(i + 1) / 16 * scale``, 0 only where the scale is."""
    return torch.where(scale == 0, scale, ((codes.float() + 1) * (1 / LEVELS) * scale).clamp_min(SMALLEST))


class Packed(Grouped):
    """Base of the grouped codecs whose codes take half a byte: codes ``[*rows, ceil(length / 2)]``."""

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        codes, *metadata = super().encode(x)
        return packed(codes, *rows_of(x.shape, self.group_size)), *metadata

    def decode(self, parts: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        codes = unpacked(parts[0], *rows_of(shape, self.group_size)).reshape(shape)
        return super().decode((codes, *parts[1:]), shape)


@dataclass(frozen=True)
class DynamicExponent4(Packed):
    """m: 0, .01, .055, .1, .325, .55, .775, 1 times amax, with a sign."""

    signed: bool = field(default=True, init=False)
    group_size: int | None = GROUP

    @property
    def name(self) -> str:
        return "dynamic4"

    def encode_groups(self, x_NG: Tensor) -> tuple[Tensor, ...]:
        return encode_tree(x_NG, signed=True, bits=4)

    def decode_groups(self, codes_NG: Tensor, *metadata_N1: Tensor) -> Tensor:
        return decode_tree(codes_NG, metadata_N1[0], signed=True, bits=4)


@dataclass(frozen=True)
class Linear4(Packed):
    """v: sixteenths of amax. The error is amax / 32 or less, except for values under amax / 16, which become amax / 16."""

    signed: bool = field(default=False, init=False)
    group_size: int | None = GROUP

    @property
    def name(self) -> str:
        return "linear4"

    def encode_groups(self, x_NG: Tensor) -> tuple[Tensor, ...]:
        unit, amax = unit_and_amax(x_NG)
        return linear_codes(unit, x_NG, self.dithers), amax

    def decode_groups(self, codes_NG: Tensor, *metadata_N1: Tensor) -> Tensor:
        return linear_values(codes_NG, metadata_N1[0])


@dataclass(frozen=True)
class RankOne4:
    """v: sixteenths of the smaller of two amaxes, that of dim 0 and that of all other dimensions taken together.

    An outlier therefore affects its row and its column only where nothing else is as large; a non-finite element makes
    both NaN. A shard along dim 0 owns its codes and row amaxes, but column amaxes are those of the whole tensor.
    A tensor of fewer than two dimensions has one amax per 128 elements, kept as ``row_amax``, and no ``column_amax``.
    """

    rounding: str = "nearest"

    parts: ClassVar[tuple[str, ...]] = ("codes", "row_amax", "column_amax")
    group_size: ClassVar[None] = None  # an element's scale depends on the whole tensor

    @property
    def name(self) -> str:
        return "rank1_linear4"

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        if x.dim() < 2:
            return *Linear4(rounding=self.rounding).encode(x), x.new_zeros(0)
        x_RC = x.abs().reshape(x.shape[0], math.prod(x.shape[1:]))
        if x_RC.numel() == 0:
            return packed(x_RC, *_matrix(x.shape)), x_RC.new_zeros(x_RC.shape[0]), x_RC.new_zeros(x_RC.shape[1])
        row, column = x_RC.amax(1), x_RC.amax(0)
        scale_RC = torch.minimum(row[:, None], column)
        codes = linear_codes(x_RC / torch.where(scale_RC > 0, scale_RC, 1.0), x_RC, self.rounding == "dithered")
        row, column = (torch.where(amax < torch.inf, amax, torch.nan) for amax in (row, column))
        return packed(codes, *_matrix(x.shape)), row, column

    def decode(self, parts: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        codes, row, column = parts
        if len(shape) < 2:
            return Linear4().decode((codes, row), shape)
        codes_RC = unpacked(codes, *_matrix(shape))
        return linear_values(codes_RC, torch.minimum(row[:, None], column)).reshape(shape)


def _matrix(shape: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """The rows of a tensor seen as a matrix, and their length."""
    return (shape[0],), math.prod(shape[1:])
