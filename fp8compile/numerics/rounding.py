"""Stochastic rounding of FP32 to BF16 and FP16 (Croci et al. 2022; used for weight updates by Graphcore and torchao).

    SR(x) = D * (floor(x / D) + Bernoulli(x / D - floor(x / D)))        D: the spacing of the dtype's values at x
          = sign(x) * D * floor(|x| / D + u)                            u: uniform on [0, 1), from ``drawn``

so E[SR(x)] = x: 1.2 on a grid of 1 goes to 1 in 80 % and to 2 in 20 %, and a weight needs no FP32 copy.

All of it is integer arithmetic on the bits of x, the same on every backend: |x| / D is a fixed-point number with 32
fraction bits, u has 32 bits, and their sum is exact. x has 16 bits below BF16's last place and 13 below that of FP16's normal
numbers; it has more below FP16's subnormals, whose spacing stays 2**-24. While these bits are at most 32 (|x| >= 2**-33) the
probability is exact; for smaller x it is rounded down to a multiple of 2**-32, a bias under 2**-56.

  * A value that the dtype can represent is never moved; any other goes to one of its two neighbours. SR(-x) = -SR(x) for the
    same bits; signed zeros stay.
  * No finite value becomes infinite: what would round past the largest finite value stays there. inf and NaN stay (of NaNs
    the quiet ones, and no arithmetic makes another).

The random numbers depend on (seed, parameter, step, element) alone: a counter-based generator (Salmon et al. 2011) whose
hash is of the family of C. Wellons' ``triple32``: three rounds of xor-shift and multiplication, by numbers below 2**31, so
that no product overflows a signed 64-bit integer. Two rounds (``lowbias32``) are not enough for counters: elements at some
distances, such as 768, 1024 or 3072 depending on the key, then draw bits that depend on each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8compile.numerics.operators import operator

_FRACTION_BITS = 32
_MASK = 0xFFFFFFFF  # of 32 bits
MULTIPLIERS = (0x21F0AAAD, 0x735A2D97, 0x31848BAB)
_GOLDEN = 0x9E3779B9  # 2**32 / the golden ratio

_FP32_MANTISSA = 23
_FP32_INF = 0x7F800000
_LOST = 16  # bits of FP32's mantissa that BF16 lacks
_BFLOAT16_MAX = torch.finfo(torch.bfloat16).max

Word = Any  # an int or an int64 Tensor, in [0, 2**32)


@dataclass(frozen=True)
class Grid:
    """The finite values of a float format, for an FP32 number that is to be rounded to one of them.

    The *pattern* of a value is its magnitude's bits in that format: consecutive values have consecutive patterns.

    Attributes:
        mantissa: bits of the mantissa that are stored.
        smallest_normal: FP32's biased exponent of the smallest normal value.
        largest: the pattern of the largest finite value.
    """

    mantissa: int
    smallest_normal: int
    largest: int


GRIDS = {
    torch.bfloat16: Grid(mantissa=7, smallest_normal=1, largest=0x7F7F),
    torch.float16: Grid(mantissa=10, smallest_normal=113, largest=0x7BFF),
}


def grid_of(dtype: torch.dtype) -> Grid:
    """The grid of a 16-bit float dtype. Raises ValueError for any other."""
    if dtype not in GRIDS:
        raise ValueError(f"FP32 is rounded to torch.bfloat16 or torch.float16, not to {dtype}: choose one of the two")
    return GRIDS[dtype]


def round_stochastically(x: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    """x (float32) in ``dtype``, rounded up or down at random so that it is unbiased.

    Args:
        x: any shape.
        dtype: ``torch.bfloat16`` or ``torch.float16``.
        bits: int64 in [0, 2**32), one for each element: ``drawn``.
    """
    grid = grid_of(dtype)
    if dtype == torch.bfloat16:
        return _to_bfloat16(x, bits)
    base, quotient = fixed_point(x, grid)
    return of_pattern(base + ((quotient + bits) >> _FRACTION_BITS), x, dtype)


def _to_bfloat16(x: Tensor, bits: Tensor) -> Tensor:
    """The same where the bits that are dropped are always FP32's last 16: one addition of integers, whose carry rounds."""
    added = (bits >> _LOST).to(torch.int32)
    added = torch.where(x.abs() < _BFLOAT16_MAX, added, 0)  # past the largest nothing rounds up
    return (x.view(torch.int32) + added >> _LOST).to(torch.int16).view(torch.bfloat16)


def fixed_point(x: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """``(base, quotient)`` as int64: |x| / D with 32 fraction bits; base + floor(|x| / D) is |x|'s pattern, rounded down.

    Bits below the 32nd of the fraction are cut off. Where x is not finite the numbers mean nothing.
    """
    magnitude = x.view(torch.int32).to(torch.int64) & 0x7FFFFFFF
    exponent = (magnitude >> _FP32_MANTISSA).clamp_min(1)  # FP32's subnormals are spaced as its smallest normals
    significand = magnitude - ((exponent - 1) << _FP32_MANTISSA)  # with the leading 1 that is not stored
    below = (grid.smallest_normal - exponent).clamp_min(0)  # binades below the smallest normal
    # significand << 32 has 56 bits, so a shift by 56 leaves nothing; by more than 63 it would be undefined.
    dropped = (below + (_FP32_MANTISSA - grid.mantissa)).clamp_max(_FP32_MANTISSA + 1 + _FRACTION_BITS)
    base = (exponent - grid.smallest_normal).clamp_min(0) << grid.mantissa
    return base, (significand << _FRACTION_BITS) >> dropped


def of_pattern(pattern: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """The value of ``dtype`` with this pattern (at most the largest finite one's) and the sign of x; x where not finite."""
    raw = x.view(torch.int32)
    pattern = pattern.clamp_max(GRIDS[dtype].largest)
    rounded = torch.where(raw < 0, pattern - 0x8000, pattern).to(torch.int16).view(dtype)
    return torch.where((raw & 0x7FFFFFFF) < _FP32_INF, rounded, x.to(dtype))


def random_bits(index: Tensor, key: Tensor, lane: Tensor | int = 0) -> Tensor:
    """Uniform int64 in [0, 2**32): one for each index, another stream for each key.

    Args:
        index: int64, the number of the element in its whole parameter, or of its row's first: ``index_like``.
        key: int64, from ``key_of`` (each half of it must look random); broadcasts against index.
        lane: int64, the number of the element in its row, for which a GPU then needs the last 32 bits alone. A row that goes
            past a multiple of 2**32 draws what the elements 2**32 before draw.
    """
    bits: Tensor = mixed(*_counter(index + lane, index, key))
    return bits


def random_halves(index: Tensor, key: Tensor, lane: Tensor | int = 0, *, at_four: bool = False) -> Tensor:
    """The same, of which the first 16 bits are random: all that BF16 takes. Four elements share two words.

    Args:
        at_four: whether every index, without its lane, is a multiple of four: then a GPU makes words once for four.
    """
    place = index + lane
    four, of_four = ((index >> 2) + (lane >> 2), lane) if at_four else (place >> 2, place)
    bits: Tensor = HALVES(*_counter(four, index, key), of_four)
    return bits


def _counter(place: Tensor, index: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """What is hashed for a place in a stream, and what enters between the rounds."""
    other = (index >> 32) * _GOLDEN  # elements 2**32 apart do not share their bits
    return (place ^ (other ^ key)) & _MASK, (key >> 32) & _MASK


def drawn(dtype: torch.dtype, index: Tensor, key: Tensor, lane: Tensor | int = 0, *, at_four: bool = False) -> Tensor:
    """The bits that ``round_stochastically`` to ``dtype`` takes."""
    if dtype == torch.bfloat16:
        return random_halves(index, key, lane, at_four=at_four)
    return random_bits(index, key, lane)


def key_of(seed: int, parameter_index: Word, step: Tensor) -> Tensor:
    """The key of one parameter's stream at one step: an int64 on step's device.

    Its first half is a permutation of parameter_index; the second one of the step, but for a number of the parameter. So keys
    of one seed never coincide. The arguments broadcast.

    Args:
        seed: any 64-bit integer.
        parameter_index: the number of the parameter in its optimizer, in [0, 2**32).
        step: in [0, 2**32); float steps, as torch's optimizers keep them, are converted (exact up to 2**24).
    """
    return key_at(seed, stream_of(seed, parameter_index), step)


def stream_of(seed: int, parameter_index: Word) -> Word:
    """What of a key does not depend on the step, a signed integer of 64 bits; the arguments are those of ``key_of``."""
    first, second, _ = _seeds(seed)
    low = mixed(parameter_index, first)
    return (mixed(low, second) - 2**31) * 2**32 + low  # no bit is shifted past the sign


def key_at(seed: int, stream: Word, step: Tensor) -> Tensor:
    """The key of a stream of ``stream_of`` at a step.

    From a 0-d step Inductor computes the key in a kernel of its own, which runs one thread. From ``step.expand(shape)`` the
    key is part of the kernel that rounds, computed once per thread.
    """
    *_, third = _seeds(seed)
    key: Tensor = stream ^ ((mixed(step.to(torch.int64), third) - 2**31) * 2**32)
    return key


def _seeds(seed: int) -> tuple[int, int, int]:
    low, high = seed & _MASK, (seed >> 32) & _MASK
    first: int = mixed(low ^ _GOLDEN, high)
    second: int = mixed(high ^ _GOLDEN, first)
    return first, second, mixed(second ^ _GOLDEN, low)


def mixed(word: Word, between: Word) -> Word:
    """A permutation of 32-bit words under which each bit of the result depends on all of ``word``; another for each
    ``between``, which enters after the first of the three rounds."""
    if isinstance(word, Tensor):
        found: Tensor = MIXED(word, between if isinstance(between, Tensor) else torch.full_like(word, between))
        return found
    return _mixed(word, between)


def _mixed(word: Word, between: Word) -> Word:
    word = word ^ (word >> 16)
    word = (word * MULTIPLIERS[0]) & _MASK
    word = word ^ (word >> 15) ^ between
    word = (word * MULTIPLIERS[1]) & _MASK
    word = word ^ (word >> 15)
    word = (word * MULTIPLIERS[2]) & _MASK
    return word ^ (word >> 15)


def _halves(word: Tensor, between: Tensor, place: Tensor) -> Tensor:
    """Of two words, the second one round behind the first, the half that belongs to ``place``, as the first 16 of 32 bits."""
    first = _mixed(word, between)
    second = ((first ^ between) * MULTIPLIERS[0]) & _MASK
    chosen = torch.where(place & 2 != 0, second ^ (second >> 15), first)
    return torch.where(place & 1 != 0, (chosen << 16) & _MASK, chosen)


# Whole in a graph, so that a GPU gets them in words of 32 bits.
MIXED = operator("mixed(Tensor word, Tensor between) -> Tensor", _mixed)
HALVES = operator("halves(Tensor word, Tensor between, Tensor place) -> Tensor", _halves)


def rows_and_lanes(shape: Sequence[int], first: Tensor, stride: Sequence[int]) -> tuple[Tensor, Tensor]:
    """``index_like`` in two: the number of each row's first element ``[..., 1]``, and of each element in its row ``[n]``."""
    rows = index_like((*shape[:-1], 1), first, stride)
    return rows, torch.arange(shape[-1], device=first.device) * stride[-1]


def index_like(shape: Sequence[int], first: Tensor, stride: Sequence[int] | None = None) -> Tensor:
    """int64 numbers ``first, first + 1, ...`` in ``shape``: the positions of a shard's elements in their whole tensor.

    So a shard along the first dimension, ``first = first row * numel of a row``, draws what the whole tensor would draw.
    ``stride``: the stride of a view of a contiguous tensor; None: the tensor is contiguous itself.
    """
    index, inner = first, 1
    for dim in reversed(range(len(shape))):
        step = inner if stride is None else stride[dim]
        along = torch.arange(shape[dim], device=first.device) * step
        index = index + along.reshape(-1, *[1] * (len(shape) - dim - 1))
        inner *= shape[dim]
    return index


def nearest_bfloat16(x: Tensor) -> Tensor:
    """x (float32) on the grid of BF16, still as FP32: to nearest, ties to even, as ``x.to(torch.bfloat16)``.

    By integer arithmetic: where more is computed from the rounded value, Inductor drops a cast, and computes with x.
    """
    raw = x.view(torch.int32)
    rounded = (raw + 0x7FFF + ((raw >> 16) & 1)) & -0x10000
    return torch.where(x.abs() < torch.inf, rounded.view(torch.float32), x)
