"""Dithered rounding of second moments: up or down, so that the decoded value is unbiased; the value itself decides.

    n = floor(y), f = y - n      y: a magnitude in code steps; code n stands for c n**q
    p = f (1 - (q - 1) / (2 n + 1) (1 - f))                code = n + [t(x) < p]                E[decoded] = c y**q

Of FP8 codes, whose steps differ, the noise is added before it is rounded down: code = floor(y + t y / D), where
D = y + (q - 1) / 2 (1 - t). That is p = f / (1 + (q - 1) / 2 (1 - f) / y), the same to first order in 1 / n.

Why: v <- b2 v + (1 - b2) g**2 shrinks by a factor, which the FP32 amax of its group takes up exactly, and grows by an amount
that is mostly less than half a code step. Rounded to nearest, this amount is lost at every step, so v comes out too small.

Why not p = f: codes are even steps of y, not of v = c y**q, so E[v] would be off by q (q - 1) / 2 f (1 - f) / n**2, each
time. Over the 1 / (1 - b2) steps that v remembers this adds up to (q - 1) / (2 n), some per cent. With p as above, exact
for q = 1 and q = 2, what remains is (q - 1) (q - 2) / (6 (n + 1/2)**2) (1/2 - f) f (1 - f) of a code step: 2e-4 f at E4M3's
n >= 8 and k = 1.25, q = 1 / k. Of FP8 codes it is c f (1 - f) (f (2 - c) + 2 c - 1) / (3 n**2), c = (q - 1) / 2: 6e-4 f.

t(x) looks random but is a pure function: FP32's mantissa times a number, modulo 1 (multiplicative hashing: Knuth, TAOCP 6.4).
Each of 4096 thresholds has as many mantissas, and the number's continued fraction has small terms: of N numbers in sequence,
or 2**4, 2**7 or 2**12 apart, thresholds are spread to some 3 / N. So encoding needs no seed and no step, and x * 2**n is
rounded as x is. A value within 2**-13 of a step from a code always gets that code: FP32's roundings move none, and a state
that only decays keeps its codes.

BF16 has no FP32 scale that takes the factor up: a state that only decays stays where it is.

The price is noise. A step that changes v by d = (1 - b2) a v, a around 1, does so by a jump of s, the spacing of codes, with
a chance of d / s; so v's variance settles at d s / (2 (1 - b2)) = a s v / 2, for any b2. In E4M3 with expansion v errs by 5
to 11 % about the right mean. As 1 / sqrt(v) is convex, updates are longer by 3/8 of that error's square: 0.1 to 0.4 %.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8compile.numerics import near_functions as near
from fp8compile.numerics.code_forms import FORMATS
from fp8compile.numerics.formats import Format
from fp8compile.numerics.operators import operator
from fp8compile.numerics.states.interface import SMALLEST

ROUNDINGS = ("nearest", "dithered")

_BITS = 12
_MASK = 2**_BITS - 1
LOW, HIGH = 2404, 2846  # of the multiplier below; HIGH is even, so that no exponent counts
MULTIPLIER = (LOW << _BITS - 1) + HIGH // 2
_FP32_MANTISSA = 23
_LOST = 16  # bits of FP32's mantissa that BF16 lacks
_HALF_A_STEP = 1 << _FP32_MANTISSA - _BITS - 1  # of a mantissa: 2**-13
_LARGEST = torch.finfo(torch.bfloat16).max
_EXPONENT = 0x7F800000  # of an FP32
_ONE_SQUARED = 0x7F000000  # twice the FP32 bits of 1.0: less those of 2**e this is 2**-e


def threshold_of(x: Tensor) -> Tensor:
    """A number in (0, 1) for each FP32 number, any shape: an odd multiple of 2**-13, from the mantissa alone."""
    return _part_and_threshold(x, 1.0) - 1


def _part_and_threshold(x: Tensor, part: float) -> Tensor:
    """1 + the threshold, times a power of two, ``part``."""
    hashed: Tensor = HASHED(x.view(torch.int32))
    return (hashed | near.bits_of(part) | _HALF_A_STEP).view(torch.float32)  # no conversion of integers


def _hashed(bits: Tensor) -> Tensor:
    """Of int32 bits the first 12 of a mantissa, the 11 after them 0; no product leaves 32 bits."""
    low, high = bits & _MASK, (bits >> _BITS) & (_MASK >> 1)
    product = low * LOW + high * HIGH + (low * HIGH >> _BITS)
    hashed: Tensor = (product & _MASK) << _FP32_MANTISSA - _BITS
    return hashed


# Whole in a graph: on a GPU products wrap, and it is one of them.
HASHED = operator("hashed(Tensor bits) -> Tensor", _hashed)


def _truncated(y: Tensor, dtype: torch.dtype) -> Tensor:
    fmt = FORMATS[dtype]
    spacing = binade_at(y, fmt) * (2 * fmt.half_ulp)
    steps = y * (_ONE_SQUARED - spacing.view(torch.int32)).view(torch.float32)  # exact, as no division on a GPU is
    return (steps.floor() * spacing).clamp_max(fmt.max).to(dtype)


# y >= 0 (FP32, any shape) in an FP8 dtype, rounded down. On a GPU three instructions: see fx/near_lowerings.py.
TRUNCATED = operator("truncated(Tensor y, ScalarType dtype) -> Tensor", _truncated)


def binade_at(y: Tensor, fmt: Format) -> Tensor:
    """The largest power of two up to y >= 0, at least ``fmt``'s smallest normal code. Codes are 2 half_ulp of it apart."""
    binade = (y.view(torch.int32) & _EXPONENT).view(torch.float32)
    return near.at_least(binade, fmt.smallest / (2 * fmt.half_ulp))


def dithered(y: Tensor, x: Tensor, power: float | Tensor | None = None) -> Tensor:
    """y >= 0, in code steps, rounded to one of the two whole numbers beside it.

    Args:
        y: any shape, FP32.
        x: the same shape: the FP32 number that y was made from, which decides.
        power: q, where codes stand for numbers in proportion to code ** q; broadcasts against y. None: 1.
    """
    below = y.floor()
    rest, threshold = y - below, threshold_of(x)
    if power is None:
        return below + (threshold < rest).float()
    # t < p, times 2 n + 1: without a division
    goes_up = (2 * below + 1) * (rest - threshold) > (power - 1) * (rest - rest * rest)
    return below + goes_up.float()


def dithered_to(y: Tensor, fmt: Format, x: Tensor, power: Tensor | None = None) -> Tensor:
    """y in [0, fmt.max] as one of the two codes of ``fmt`` beside it; arguments as above, y in codes. Returns ``fmt.dtype``.

    Of FP8 codes all is in their spacing s: noise t s, and D s.
    """
    if not fmt.is_float:
        return dithered(y, x, power).to(fmt.dtype)
    binade, part = binade_at(y, fmt), 2 * fmt.half_ulp  # which a code's spacing is of its binade
    raised = binade * _part_and_threshold(x, part)  # s (1 + t)
    noise = raised - binade * part
    if power is not None:
        rest = binade * (2 * part) - raised
        noise = noise * near.quotient(y, near.at_least(y, fmt.smallest) + (power - 1) / 2 * rest)
    codes: Tensor = TRUNCATED(y + noise, fmt.dtype)
    return codes


def dithered_to_bfloat16(x: Tensor) -> Tensor:
    """x >= 0, FP32 of any shape, rounded to one of the two BF16 numbers beside it, as FP32; inf and NaN stay.

    No finite number becomes inf, and none above 0 is less than 2**-126.
    """
    bits = x.view(torch.int32)
    chance = (bits & (1 << _LOST) - 1).float() * 2.0**-_LOST
    up = (threshold_of(x) < chance).to(torch.int32)
    rounded = ((bits >> _LOST) + up << _LOST).view(torch.float32)
    return torch.where((x > 0) & (x < torch.inf), rounded.clamp(SMALLEST, _LARGEST), x)
