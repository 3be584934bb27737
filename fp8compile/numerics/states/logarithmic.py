"""Second moments in even steps of their logarithm (SOLO, Xu et al. 2025), four or two bits each.

    log4    0, and amax * 2**(-j s), j = 0 ... 14     s: a step in octaves, of the group: 2**(c / 2 - 8), c = 0 ... 25
    log2    amax * 4**-j,            j = 0 ... 3      no zero, as in ``four_bit``: an exact 0 decodes to amax / 64

s is the least for which 14 steps reach the group's smallest value; c stands in the last five bits of amax, which is then
right to 2**-19. SOLO makes its step from a quantile of the group, which takes a sort, and has one more number to store. Steps
that change at every turn cost more than coarse ones do, since all values are rounded anew: hence half octaves of s.
A value below the last level becomes that, which shortens its updates; none decodes to less than 2**-126. A range of more than
128 octaves counts as the largest there is.

Rounding. Nearest, a code moves up only if one step takes v past the middle of two levels, r = 2**s apart:

    b2 v + (1 - b2) g**2 >= v sqrt(r)      g**2 / v >= 1 + (sqrt(r) - 1) / (1 - b2)      never down if b2 > 1 / sqrt(r)

(SOLO's *signal swamping*: at b2 = 0.999 and r = sqrt 2 a gradient must be 14 times its usual size.) So b2 would have to be
1 / sqrt(r) or less to match. Dithered (``dither``), a code moves with a chance instead, and any b2 will do: a jump of
D = r - 1 times v comes d = (1 - b2) |g**2 / v - 1| / D times a step, so v's relative variance is a D / 2, a the mean of |g**2
/ v - 1|, whatever b2 is: nothing to match.

But what is to be unbiased? A chance that keeps the mean of v**p moves that of v, relatively, by (1 - p) / 2 * a D
until its return balances it (Ito). So the mean of 1 / sqrt(v) is off by

    -(1 - p) / 4 * a D + 3 / 16 * a D   = 0 for p = 1/4.

p = 1 (right in v, as for eight bits, where D is small) makes updates longer by 3 / 16 a D: a tenth. Hence

    f = the share of a step that v is below its upper level      chance to go down = (1 - 2**(-s f / 4)) / (1 - 2**(-s / 4))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from fp8compile.numerics.states.dither import threshold_of
from fp8compile.numerics.states.interface import GROUP, SMALLEST, zeros_or
from fp8compile.numerics.states.packing import Planar

CLASS_BITS, MOST_CLASS = 5, 25  # 14 steps of class 25 are 316 octaves, more than FP32 has
POWER = 0.25  # of v, whose mean rounding keeps
SLACK = 2.0**-6  # of a class: the steps of values that lie on levels do not grow by a rounding
_LARGEST = 0x7F7FFFFF  # FP32's largest, as an integer
_MASK = 2**CLASS_BITS - 1


@dataclass(frozen=True)
class _Logarithmic(Planar):
    """Levels ``amax * 2**(-j s)``."""

    signed: bool = field(default=False, init=False)
    group_size: int | None = GROUP

    bits: ClassVar[int]
    lowest: ClassVar[int]  # the code of the smallest value that is not 0

    @property
    def steps(self) -> int:
        """From the smallest level to the largest."""
        return int(2**self.bits) - 1 - self.lowest

    def step_of(self, amax: Tensor) -> Tensor | float:
        """s in octaves, by the stored amax."""
        raise NotImplementedError

    def codes_of(self, x: Tensor, *basis: Tensor) -> Tensor:
        amax, frame = basis
        step = self.step_of(frame)
        down = (torch.log2(amax / x.clamp_min(SMALLEST)) / step).clamp(0, self.steps)
        codes = 2**self.bits - 1 - (went_down(down, x, step) if self.dithers else down.round())
        return torch.where(x > 0, codes, 0.0)

    def metadata_of(self, *basis: Tensor) -> tuple[Tensor, ...]:
        return basis[1:]

    def level_of(self, codes: Tensor, amax: Tensor) -> Tensor:
        """What a code stands for where it is not 0."""
        half = torch.exp2((codes.float() - (2**self.bits - 1)) * self.step_of(amax) * 0.5)
        return amax * half * half  # half the exponent twice: one FP32 factor cannot hold 2**-254


@dataclass(frozen=True)
class Log4(_Logarithmic):
    """Zero and 15 levels, whose steps the group's range decides. Rounded to nearest, off by a factor 2**(s / 2) at most."""

    bits: ClassVar[int] = 4
    lowest: ClassVar[int] = 1

    @property
    def name(self) -> str:
        return "log4"

    def step_of(self, amax: Tensor) -> Tensor | float:
        return torch.exp2((amax.view(torch.int32) & _MASK).float() * 0.5 - 8)

    def basis(self, planes: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """amax, at least 2**-126, and the amax that is stored, with the class of the step in its last bits."""
        amax = largest(planes)
        amin = smallest(planes)
        held = amax.clamp_min(SMALLEST)
        octaves = torch.log2(held / torch.minimum(amin, held).clamp_min(SMALLEST))
        step = torch.ceil(2 * torch.log2(octaves / self.steps) + (16 - SLACK)).clamp(0, MOST_CLASS)
        frame = with_class(held, torch.where(amax < torch.inf, step, 0.0).to(torch.int32))
        frame = torch.where(amax > 0, frame, 0.0)
        return held, torch.where(amax < torch.inf, frame, torch.nan)

    def decode_groups(self, codes_NG: Tensor, *metadata_N1: Tensor) -> Tensor:
        [amax] = metadata_N1
        return zeros_or(codes_NG, amax, self.level_of(codes_NG, amax))


@dataclass(frozen=True)
class Log2(_Logarithmic):
    """Four levels, a factor of 4 apart. Rounded to nearest, off by a factor of 2 at most down to amax / 128."""

    bits: ClassVar[int] = 2
    lowest: ClassVar[int] = 0

    @property
    def name(self) -> str:
        return "log2"

    def step_of(self, amax: Tensor) -> Tensor | float:
        return 2.0

    def basis(self, planes: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """amax, at least 2**-126, and the amax that is stored: 0 of an all-zero group."""
        amax = largest(planes)
        held = amax.clamp_min(SMALLEST)
        stored = torch.where(amax > 0, held, 0.0)
        return held, torch.where(amax < torch.inf, stored, torch.nan)

    def decode_groups(self, codes_NG: Tensor, *metadata_N1: Tensor) -> Tensor:
        [amax] = metadata_N1
        return torch.where(amax == 0, amax, self.level_of(codes_NG, amax).clamp_min(SMALLEST))


def went_down(down: Tensor, x: Tensor, step: Tensor | float) -> Tensor:
    """``down``, in steps below the largest level, to one of the two levels beside it: v**POWER is unbiased."""
    above = down.floor()
    bend = step * (-math.log(2) * POWER)
    bend = bend if isinstance(bend, Tensor) else torch.full_like(above, bend)
    chance = torch.expm1(bend * (down - above)) / torch.expm1(bend)
    return above + (threshold_of(x) < chance).float()


def with_class(amax: Tensor, step: Tensor) -> Tensor:
    """The number nearest to ``amax`` whose last bits are the class of a step."""
    bits = ((amax.view(torch.int32) - step + _MASK // 2 + 1) & ~_MASK) + step
    return torch.minimum(bits, step + (_LARGEST - _MASK)).view(torch.float32)


def largest(planes: Sequence[Tensor]) -> Tensor:
    """The largest magnitude of a group's planes, ``[N, 1]``."""
    found = planes[0].abs()
    for plane in planes[1:]:
        found = torch.maximum(found, plane.abs())
    return found.amax(-1, keepdim=True)


def smallest(planes: Sequence[Tensor]) -> Tensor:
    """The smallest above 0 of a group's planes, ``[N, 1]``; inf where there is none."""
    found = torch.where(planes[0] > 0, planes[0], torch.inf)
    for plane in planes[1:]:
        found = torch.minimum(found, torch.where(plane > 0, plane, torch.inf))
    return found.amin(-1, keepdim=True)
