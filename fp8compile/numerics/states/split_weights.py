"""24-bit master weights as a 16-bit weight and an 8-bit correction (FlashOptim, Gonzalez Ortiz et al. 2026).

    joined = weight + sign(weight) * correction * gap / 256            correction: int8, -128 ... 127
    gap    = distance from the weight to its neighbour on the correction's side

The gap is one ulp, except below a power of two, where it is half of one. So the joined values are those of a float format
with eight more bits of mantissa, and bits(joined) = 256 * bits(weight) + correction as integers. FlashOptim's correction
counts in 1/254 of an ulp on both sides, so half of its range is idle below a power of two.

The master is rounded once, to the nearest joined value (ties to even); both parts follow from that:
    split(joined(w, c)) == (w, c)          for all finite w and all c, except c < 0 at w = 0, which split never makes
    |joined(*split(x)) - x| <= D / 2       D = the spacing of joined values at x = ulp of the 16-bit dtype at x / 256,
so for normal x the relative error is at most 2**-16 in BF16 and 2**-19 in FP16 (2**-8 and 2**-11 without correction), and
a tensor's NMSE at most its square: 2.4e-10 and 3.7e-12. The weight is the 16-bit value nearest to the *joined* one, a tie
going to the larger magnitude. It can differ from the value nearest to x where x is within D / 2 of a tie.

    zero        split(+-0) = (+-0, 0). joined reads c < 0 at a zero as that zero.
    finite      never becomes infinite: past the largest joined value (the dtype's largest + 127/256 ulp) it saturates.
    inf, NaN    stay in the weight, with correction 0; joined ignores the correction there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8compile.numerics.rounding import Grid, fixed_point, grid_of, of_pattern

_HALF = 2**31  # one half as a 32-bit fraction
_FP32_MANTISSA = 23
_SIGN = -0x80000000  # of an int32


def split(master: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``(weight, correction)`` of an FP32 tensor: ``dtype`` (BF16 or FP16) and int8, of the same shape."""
    coarse = grid_of(dtype)
    fine = Grid(coarse.mantissa + 8, coarse.smallest_normal, (coarse.largest << 8) + 127)
    base, quotient = fixed_point(master, fine)
    odd = (quotient >> 32) & 1
    pattern = (base + ((quotient + (_HALF - 1) + odd) >> 32)).clamp_max(fine.largest)  # to nearest, ties to even
    weight = (pattern + 128) >> 8
    correction = torch.where(master.abs() < torch.inf, pattern - (weight << 8), 0)
    return of_pattern(weight, master, dtype), correction.to(torch.int8)


def joined(weight: Tensor, correction: Tensor) -> Tensor:
    """The FP32 master that ``split`` took apart, exactly."""
    grid = grid_of(weight.dtype)
    raw = weight.view(torch.int16).to(torch.int32)
    pattern = (((raw & 0x7FFF) << 8) + correction).clamp_min(0)
    bits = pattern << (_FP32_MANTISSA - grid.mantissa - 8)  # the mantissa where FP32 has it
    bits = bits + ((grid.smallest_normal - 1) << _FP32_MANTISSA)
    if grid.smallest_normal > 1:  # FP16, whose subnormals are normal in FP32
        spacing = 2.0 ** (grid.smallest_normal - 127 - grid.mantissa - 8)
        bits = torch.where(pattern < 1 << (grid.mantissa + 8), (pattern.float() * spacing).view(torch.int32), bits)
    signed = (bits | (raw & _SIGN)).view(torch.float32)  # not by a minus: Triton's -x is 0 - x, which loses -0
    return torch.where((raw & 0x7FFF) > grid.largest, weight.float(), signed)
