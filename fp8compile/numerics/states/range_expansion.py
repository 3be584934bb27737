"""Dynamic range expansion: a group's values raised to a power that spreads them over a float format (COAT, section 4).

    R    = max |x| / min |x|                      over the non-zero elements of a group
    k    = log(target) / log(R)                   in sixteenths, rounded down, 1/16 ... 255/16; stored in one byte
    code = round(FMAX * (|x| / max) ** k)         with x's sign
    x_hat = max * (|code| / FMAX) ** (1 / k)

COAT also divides by sqrt(max * min) and stores that; it cancels exactly, so max (FP32) and k are all there is to keep.
``target`` is the value that R**k gets. The paper's target puts the smallest element onto the format's smallest subnormal;
COAT's code puts it at 2 / FMAX, some subnormals higher, where rounding costs it less. Both are here (``expand_range``).

Codes start at FMAX / target, which is at least the smallest subnormal, because k is rounded down: R**k <= target. So no
element from 2**-110 up decodes to zero: magnitudes below FP32's normal ones count as 2**-126, R is at most 2**254, k never
has to be below 1/16, and a code rounded down, (1/2)**(1/k) = 2**-16 of its value at worst, is still a normal number; GPUs
flush others. Smaller elements may decode to zero. A group of one value has no range: k is the largest, and its code is FMAX,
which comes back as max exactly. An all-zero group comes back as zeros.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fp8compile.numerics import near_functions as near
from fp8compile.numerics.formats import E4M3, E5M2, Format
from fp8compile.numerics.states.dither import dithered_to
from fp8compile.numerics.states.interface import Grouped

STEPS_OF_K = 16  # k is stored in sixteenths
LEAST = 2.0**-126  # what a group's largest and smallest count as at least
KEPT = 2.0**-110  # no magnitude from here up decodes to zero
# By format: below which k, in sixteenths, how many binades a step of a code's power stand in amax's place, so that the power,
# what is left of amax and the result are normal numbers; and the least k.
SHIFTS = {E4M3: (3.0, 62.0), E5M2: (5.0, 41.0)}
LEAST_K = {E4M3: 1.0, E5M2: 2.0}  # none is below 1: R is at most 2**254
MOST = 2.0**128 - 2.0**116  # what is stored of amax at most: a function that errs as a GPU's do makes no inf of it


@dataclass(frozen=True)
class Expanded(Grouped):
    """Range-expanded E4M3 or E5M2.

    Relative error of an element whose code is normal: at most ``(1 + half_ulp) ** (1 / k) - 1``, about half_ulp / k; where
    the code is subnormal, half a subnormal step instead of half_ulp.

    Attributes:
        format: E4M3 or E5M2.
        expand_range: "code" for the target of COAT's code (FMAX ** 2 / 2), "paper" for the whole range of the format.
    """

    format: Format = E4M3
    expand_range: str = "code"

    parts: ClassVar[tuple[str, ...]] = ("codes", "amax", "k")

    @property
    def name(self) -> str:
        return f"{self.format.name}_expanded"

    @property
    def target(self) -> float:
        """The range that a group is spread over."""
        if self.expand_range == "paper":
            return self.format.max / self.format.smallest
        return self.format.max**2 / 2

    def encode_groups(self, x_NG: Tensor) -> tuple[Tensor, ...]:
        amax, log_amax, log_amin, logs = logarithms(self._magnitudes(x_NG), precise=self.dithers)
        k = self.k_of(log_amax - log_amin)
        power = k * (1 / STEPS_OF_K)
        codes = near.exp2(logs * power + (math.log2(self.format.max) - log_amax * power))
        if self.expand_range == "paper":  # the other target stays twice as far from 0 and more
            codes = torch.where(codes > 0, near.at_least(codes, self.format.smallest), codes)
        if self.dithers:
            codes = dithered_to(codes, self.format, x_NG, near.quotient(sixteen(k), k))
        else:
            codes = near.signed_as(codes, x_NG) if self.signed else codes
            codes = codes.to(self.format.dtype)  # FMAX, a little off, is rounded to itself
        amax = torch.where(amax < torch.inf, near.at_most(amax, MOST), torch.nan)
        return codes, amax, k.to(torch.uint8)

    def _magnitudes(self, x_NG: Tensor) -> Tensor:
        return x_NG.abs() if self.signed else near.unsigned(x_NG)

    def k_of(self, log_range: Tensor) -> Tensor:
        """k in sixteenths, whole numbers as FP32, for log2(R) >= 0; the most where there is no range."""
        steps = torch.full_like(log_range, STEPS_OF_K * math.log2(self.target))
        k = near.at_most(torch.floor(near.quotient(steps, near.at_least(log_range, 1.0))), 255.0)
        least = LEAST_K[self.format]
        return near.at_least(k, least) if least > 1 else k

    def decode_groups(self, codes_NG: Tensor, *metadata_N1: Tensor) -> Tensor:
        amax, k = metadata_N1[0], metadata_N1[1].float()
        codes = codes_NG.float()
        below, binades = SHIFTS[self.format]
        shift = near.at_least(binades * (below - k), 0.0)
        power = near.exp2(near.log2(codes.abs() * (1 / self.format.max)) * near.quotient(sixteen(k), k) + shift)
        a = amax * near.exp2(-shift) * power
        return near.signed_as(a, codes) if self.signed else a


def sixteen(k: Tensor) -> Tensor:
    """16 as FP32, of the shape of ``k``."""
    return torch.full_like(k, STEPS_OF_K, dtype=torch.float32)


def logarithms(a_NG: Tensor, *, precise: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For magnitudes ``[N, G]``: amax, and log2 of amax, of the smallest that is not zero, and of each.

    The first two count as LEAST at least; the logarithm of 0 is -inf. Zeros never count as the smallest, wherever they are.
    For an all-zero group both logarithms are the same.

    Args:
        precise: take logarithms of each times a unit that takes amax to 1 where it is smaller: the nearer to 1, the less a
            logarithm errs. They are those of the products then.
    """
    amax, amin = near.largest(a_NG), near.smallest_above_zero(a_NG)
    most, least = near.at_least(amax, LEAST), near.at_least(amin, LEAST)
    if not precise:
        return amax, near.log2(most), near.log2(least), near.log2(a_NG)
    unit = near.at_least(near.quotient(torch.ones_like(amax), most), 1.0)
    return amax, near.log2(most * unit), near.log2(least * unit), near.log2(a_NG * unit)
