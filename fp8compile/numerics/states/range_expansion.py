"""Dynamic range expansion: a group's values raised to a power that spreads them over a float format (COAT, section 4).

    R    = max |x| / min |x|                      over the non-zero elements of a group
    k    = log(target) / log(R)                   in sixteenths, rounded down, 1/16 ... 255/16; stored in one byte
    code = round(FMAX * (|x| / max) ** k)         with x's sign
    x_hat = max * (|code| / FMAX) ** (1 / k)

COAT also divides by sqrt(max * min) and stores that; it cancels exactly, so max (FP32) and k are all there is to keep.
``target`` is the value that R**k gets. The paper's target puts the smallest element onto the format's smallest subnormal;
COAT's code puts it at 2 / FMAX, some subnormals higher, where rounding costs it less. Both are here (``expand_range``).

No non-zero element decodes to zero: R**k <= target, because k is rounded down, so codes start at FMAX / target, which
is at least the smallest subnormal. Magnitudes below 2**-126 count as 2**-126 (GPUs flush smaller ones), so R is at most
2**254 and k never has to be below 1/16. A group of one value has no range: k = 1, and its code is FMAX, which comes back as
max exactly. An all-zero group comes back as zeros.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fp8compile.numerics import near_functions as near
from fp8compile.numerics.formats import E4M3, Format
from fp8compile.numerics.states.dither import dithered_to
from fp8compile.numerics.states.interface import SMALLEST, Grouped

STEPS_OF_K = 16  # k is stored in sixteenths


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
        a = x_NG.abs()
        amax, unit, log_amax, log_amin = extremes(a)
        k = self.k_of(log_amax - log_amin)
        power = k.float() * (1 / STEPS_OF_K)
        spread = near.exp2(log2_of(a, unit) * power + (math.log2(self.format.max) - log_amax * power))
        if self.expand_range == "paper":  # the other target stays twice as far from 0 and more
            spread = near.at_least(spread, self.format.smallest)
        codes = torch.where(a == 0, 0.0, near.at_most(spread, self.format.max))
        codes = dithered_to(codes, self.format, x_NG, near.quotient(sixteen(k), k.float())) if self.dithers else codes
        codes = torch.where(x_NG < 0, -codes, codes) if self.signed else codes
        return codes.to(self.format.dtype), torch.where(amax < torch.inf, amax, torch.nan), k

    def k_of(self, log_range: Tensor) -> Tensor:
        """k in sixteenths as uint8 for log2(R) >= 0; 1.0 where there is no range."""
        k = torch.floor(near.quotient(torch.full_like(log_range, STEPS_OF_K * math.log2(self.target)), log_range))
        k = near.at_most(near.at_least(k, 1.0), 255.0)
        return torch.where(log_range > 0, k, STEPS_OF_K).to(torch.uint8)

    def decode_groups(self, codes_NG: Tensor, *metadata_N1: Tensor) -> Tensor:
        amax, k = metadata_N1
        codes = codes_NG.float()
        # Half the exponent twice: R reaches 2**254, more than one FP32 factor can hold.
        half = near.exp2(near.log2(codes.abs() * (1 / self.format.max)) * near.quotient(sixteen(k) / 2, k.float()))
        half = near.at_most(half, 1.0)  # where a device's logarithm of 1 is above 0
        is_zero = (codes == 0) & (amax < torch.inf)  # in a NaN group nothing is zero
        a = torch.where(is_zero, 0.0, near.at_least(amax * half * half, SMALLEST))
        return torch.where(codes < 0, -a, a) if self.signed else a


def sixteen(k: Tensor) -> Tensor:
    """16 as FP32, of the shape of ``k``."""
    return torch.full_like(k, STEPS_OF_K, dtype=torch.float32)


def extremes(a_NG: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For magnitudes ``[N, G]``: amax, a unit, and log2 of amax and of the smallest that is not zero, both times the unit.

    The unit takes amax to 1 where it is smaller: the nearer to 1, the less a logarithm errs. It is 1 at least, so that no
    magnitude is flushed. Zeros never count, wherever they are. For an all-zero group both logarithms are the same.
    """
    amax = near.largest(a_NG)
    amin = near.smallest(torch.where(a_NG == 0, torch.inf, a_NG))
    unit = near.at_least(near.quotient(torch.ones_like(amax), near.at_least(amax, SMALLEST)), 1.0)
    log_amax = log2_of(amax, unit)
    return amax, unit, log_amax, torch.minimum(log2_of(amin, unit), log_amax)


def log2_of(a: Tensor, unit: Tensor) -> Tensor:
    """log2 of magnitudes times ``unit``; those below SMALLEST count as SMALLEST."""
    return near.log2(near.at_least(a, SMALLEST) * unit)
