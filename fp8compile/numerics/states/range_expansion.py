"""Dynamic range expansion: a group's values raised to a power that spreads them over a float format (COAT, section 4).

    R    = max |x| / min |x|                      over the non-zero elements of a group
    k    = log(target) / log(R)                   in sixteenths, rounded down, 1/16 ... 255/16; stored in one byte
    code = round(FMAX * (|x| / max) ** k)         with x's sign
    x_hat = max * (|code| / FMAX) ** (1 / k)

COAT also divides by sqrt(max * min) and stores that; it cancels exactly, so max (FP32) and k are all there is to keep.
``target`` is the value that R**k gets. The paper's target puts the smallest element onto the format's smallest subnormal;
COAT's code puts it at 2 / FMAX, some subnormals higher, where rounding costs it less. Both are here (``expand_range``).

No non-zero element decodes to zero: R**k <= target, because k is rounded down, so codes start at FMAX / target, which
is at least the smallest subnormal. Magnitudes below 2**-110 count as 2**-110: R is at most 2**238, k never has to be below
1/16, and a code rounded down, (1/2)**(1/k) = 2**-16 of its value at worst, is still a normal number; GPUs flush others.
A group of one value has no range: k = 1, and its code is FMAX, which comes back as max exactly. An all-zero group comes
back as zeros.
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
from fp8compile.numerics.states.interface import Grouped

STEPS_OF_K = 16  # k is stored in sixteenths
LEAST = 2.0**-110  # what a magnitude above 0 counts as at least
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
        amax, log_amax, log_amin, logs = logarithms(x_NG.abs())
        k = self.k_of(log_amax - log_amin)
        power = k.float() * (1 / STEPS_OF_K)
        codes = near.exp2(logs * power + (math.log2(self.format.max) - log_amax * power))
        if self.expand_range == "paper":  # the other target stays twice as far from 0 and more
            codes = torch.where(codes > 0, near.at_least(codes, self.format.smallest), codes)
        if self.dithers:
            power = near.quotient(sixteen(k), k.float())
            codes = dithered_to(near.at_most(codes, self.format.max), self.format, x_NG, power)
        codes = near.signed_as(codes, x_NG) if self.signed else codes  # FMAX, a little off, is rounded to itself
        return codes.to(self.format.dtype), torch.where(amax < torch.inf, near.at_most(amax, MOST), torch.nan), k

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
        a = amax * half * half
        return near.signed_as(a, codes) if self.signed else a


def sixteen(k: Tensor) -> Tensor:
    """16 as FP32, of the shape of ``k``."""
    return torch.full_like(k, STEPS_OF_K, dtype=torch.float32)


def logarithms(a_NG: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For magnitudes ``[N, G]``: amax, and log2 of amax, of the smallest that is not zero, and of each, all times a unit.

    What is below LEAST counts as LEAST, but 0 as 0: its logarithm is -inf. The unit takes amax to 1 where it is smaller: the
    nearer to 1, the less a logarithm errs. It is 1 at least. Zeros never count as the smallest, wherever they are. For an
    all-zero group both logarithms are the same.
    """
    amax, ranks = near.largest(a_NG), near.ranks(a_NG)
    amin = near.of_ranks(ranks.amin(-1, keepdim=True))
    held = near.at_least(amax, LEAST)
    unit = near.at_least(near.quotient(torch.ones_like(amax), held), 1.0)
    log_amax = near.log2(held * unit)
    log_amin = near.log2(near.at_least(amin, LEAST) * unit)
    logs = near.log2(near.of_ranks(near.ranks_at_least(ranks, LEAST)) * unit)
    return torch.where(amax > 0, held, amax), log_amax, torch.minimum(log_amin, log_amax), logs
