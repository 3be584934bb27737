"""What is proven of a value: lower <= x <= upper, and whether it may be tiny. The arithmetic of such ranges.

[a, b] + [c, d] = [a + c, b + d];  [a, b] [c, d] = [min(ac, ad, bc, bd), max(...)]   (Moore, Interval Analysis, 1966)

An infinite bound proves nothing on that side; 0 times such a bound is 0, since what it stands for is finite.

Rounding. Addition, multiplication, division, square root and casts round to nearest, which is monotone: what is at most b
is at most fl(b) when rounded. A 16-bit node may be rounded or, inside a kernel, kept in FP32: b and fl(b) both count.
Functions err by some units of FP32's last place (``FUNCTION_ERROR``). No error crosses 0, and FP32 may flush what is below
2^-126 to 0. Overflow does not exist here: the question is what a value would be if the exponent were wide enough.

Sums. In a fixed order of additions a sum is monotone in each summand, so it lies between the computed sums of n times the
lower and n times the upper bound. Kernels add at most ``BLOCK`` numbers in a row, such partial sums in a tree of less than 64
levels: each addition errs by 2^-24, together (min(n, BLOCK) + 64) 2^-24; the product or quotient beside it is among the 64.
For a bound with 12 significant bits (any FP16 number), k times the bound is exact for k <= BLOCK = 2^12; 64 2^-24 is left.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import sympy
import torch

from fp8compile.analysis.ranges.bounds import (
    Bound,
    at_least,
    at_most,
    greatest,
    has_sign,
    least,
    nonnegative,
    positive,
    simple,
)
from fp8compile.numerics.formats import FP16_MAX, FP16_NORMAL

FLUSHED = 2.0**-126  # FP32's smallest normal number
FUNCTION_ERROR = (
    2.0**-20
)  # 8 units of 2^-23: CUDA's and SLEEF's pow, the least exact; exp, log, erf, tanh err by 1 to 2
BLOCK = 2**12  # the longest run of additions in Inductor's C++ kernels; Triton's are shorter


@dataclass(frozen=True)
class Interval:
    """What is proven of every element of a value, or of a size.

    Attributes:
        lower, upper: the bounds; -inf and inf where there is none.
        vanishing: whether it may be below FP16's normal numbers in every element at once, though some input is not.
    """

    lower: Bound
    upper: Bound
    vanishing: bool = False

    def fits(self, limit: float = FP16_MAX) -> bool:
        """Whether it is proven that FP16 holds it: it rounds to at most ``limit``, and does not vanish.

        A value above the limit by less than half an FP16 step, which is 2^-12 of the limit or more, rounds to the limit.
        """
        return not self.vanishing and self.amax < limit * (1 + 2.0**-12)

    @property
    def amax(self) -> float:
        """The greatest magnitude, for all sizes."""
        return max(-at_least(self.lower), at_most(self.upper), 0.0)

    def __str__(self) -> str:
        lower, upper = (f"{b + 0.0:.4g}" if isinstance(b, float) else str(b) for b in (self.lower, self.upper))
        return f"[{lower}, {upper}]{' may vanish' if self.vanishing else ''}"


ANYTHING = Interval(-math.inf, math.inf, True)
ZERO = Interval(0.0, 0.0)


def exactly(value: Bound) -> Interval:
    """A number, or the size that an expression stands for."""
    return between(value, value)


def between(lower: Bound, upper: Bound, vanishing: bool = False) -> Interval:
    """The range of these bounds. If all of it is below FP16's normal numbers it vanishes, if none of it is, it does not."""
    if isinstance(lower, float) and isinstance(upper, float):
        lower = -math.inf if math.isnan(lower) else lower
        upper = math.inf if math.isnan(upper) else upper
        if lower >= FP16_NORMAL or upper <= -FP16_NORMAL:
            vanishing = False
        elif lower > -FP16_NORMAL and upper < FP16_NORMAL and (lower or upper):
            vanishing = True
    return Interval(lower, upper, vanishing)


def numeric(x: Interval) -> Interval:
    """``x`` with numbers as bounds."""
    return between(at_least(x.lower), at_most(x.upper), x.vanishing)


def hull(ranges: Iterable[Interval]) -> Interval:
    """A range that contains all of ``ranges``."""
    parts = list(ranges)
    if not parts:
        return ANYTHING
    lower, upper = least([x.lower for x in parts]), greatest([x.upper for x in parts])
    return between(lower, upper, any(x.vanishing for x in parts))


def add(x: Interval, y: Interval) -> Interval:
    """It vanishes only if both do: what is not small next to the other stays."""
    vanishing = (x.vanishing or is_zero(x)) and (y.vanishing or is_zero(y))
    return between(_sum(x.lower, y.lower), _sum(x.upper, y.upper), vanishing)


def negated(x: Interval) -> Interval:
    return Interval(-x.upper, -x.lower, x.vanishing)


def times(x: Interval, y: Interval) -> Interval:
    if not all(has_sign(b) for b in (x.lower, x.upper, y.lower, y.upper)):
        x, y = numeric(x), numeric(y)
    products = [_product(a, b) for a in (x.lower, x.upper) for b in (y.lower, y.upper)]
    return between(least(products), greatest(products), x.vanishing or y.vanishing)


def squared(x: Interval) -> Interval:
    """x x >= 0, the same x twice."""
    product = times(x, x)
    lower = product.lower if positive(x.lower) or positive(-x.upper) else 0.0
    return between(lower, product.upper, x.vanishing)


def over(x: Interval, y: Interval) -> Interval:
    """A quotient; it vanishes where 1 over the divisor may be below FP16's normal numbers."""
    if nonnegative(-y.upper) and not is_zero(y):
        return over(negated(x), negated(y))
    vanishing = x.vanishing or y.amax > 1 / FP16_NORMAL
    if positive(y.lower):
        quotients = [_quotient(a, b) for a in (x.lower, x.upper) for b in (y.lower, y.upper)]
        if all(isinstance(q, float) or sympy.denom(q).is_number for q in quotients):
            return between(least(quotients), greatest(quotients), vanishing)
        return over(numeric(x), numeric(y))
    if nonnegative(y.lower) and not is_zero(y):
        if nonnegative(x.lower):
            return between(at_least(x.lower) / at_most(y.upper), math.inf, vanishing)
        if nonnegative(-x.upper):
            return between(-math.inf, at_most(x.upper) / at_most(y.upper), vanishing)
    return between(-math.inf, math.inf, vanishing)


def monotone(x: Interval, f: Callable[[float], float], vanishing: bool) -> Interval:
    """f of ``x`` for an increasing f; infinite where f overflows or is not defined."""
    return between(_valued(f, at_least(x.lower), -math.inf), _valued(f, at_most(x.upper), math.inf), vanishing)


def summed(x: Interval, n: Bound) -> Interval:
    """A sum of n elements of ``x``, with the rounding of the sum."""
    return enlarged(times(x, exactly(n)), sum_error(n, x))


def enlarged(x: Interval, error: float) -> Interval:
    """``x`` with a relative error."""
    return between(_outward(x.lower, -error), _outward(x.upper, error), x.vanishing)


def sum_error(n: Bound, x: Interval | None = None) -> float:
    """The relative error of a sum of n numbers; of multiples of the bounds of ``x``, where it is given."""
    exact = x is not None and all(isinstance(b, float) and _nearest(b, 12) == b for b in (x.lower, x.upper))
    return (64 if exact else min(at_most(n), BLOCK) + 64) * 2.0**-24


def rounded(x: Interval, dtype: torch.dtype, error: float = 0.0) -> Interval:
    """``x`` after a relative error of ``error``, in FP32 and then perhaps in ``dtype``, with an unlimited exponent."""
    x = enlarged(x, error) if error else x
    bits = bits_of(dtype)
    upper, lower = _rounded_up(x.upper, bits), -_rounded_up(-x.lower, bits)
    return x if lower == x.lower and upper == x.upper else between(lower, upper, x.vanishing)


def _rounded_up(x: Bound, bits: int) -> Bound:
    """The greatest of ``x``, ``x`` rounded to FP32, and that rounded to ``bits``; what may be flushed may come that far.

    What is beyond FP16's range is in FP32 or infinite: there, FP16 does not round.
    """
    if bits == 11 and at_least(x) >= FP16_MAX:
        bits = 24
    if not isinstance(x, float):
        return _outward(x, 2.0**-24 + 2.0**-bits)
    if -FLUSHED < x < FLUSHED:
        return FLUSHED if x > 0 else 0.0
    single = max(x, _nearest(x, 24))
    return single if bits == 24 else max(single, _nearest(single, bits))


def _nearest(x: float, bits: int) -> float:
    """``x`` rounded to nearest with ``bits`` significant bits."""
    if not x or math.isinf(x):
        return x
    mantissa, exponent = math.frexp(x)
    return math.ldexp(round(math.ldexp(mantissa, bits)), exponent - bits) if exponent < 1023 else x


@functools.cache
def bits_of(dtype: torch.dtype) -> int:
    """Bits of the significand: 11 for FP16, 8 for BF16, 24 for FP32 and, as a backend may compute in FP32, for all else."""
    return min(24, 1 - round(math.log2(torch.finfo(dtype).eps))) if dtype.is_floating_point else 24


def is_zero(x: Interval) -> bool:
    return bool(x.lower == 0 and x.upper == 0)


def _sum(a: Bound, b: Bound) -> Bound:
    for one in (a, b):
        if isinstance(one, float) and math.isinf(one):
            return a + b if isinstance(a, float) and isinstance(b, float) else one
    return simple(a + b)


def _product(a: Bound, b: Bound) -> Bound:
    if isinstance(a, float) and isinstance(b, float):
        return a * b if a and b else 0.0
    if a == 0 or b == 0:
        return 0.0
    for one, other in ((a, b), (b, a)):
        if isinstance(one, float) and math.isinf(one):
            return one if nonnegative(other) else -one
    return simple(a * b)


def _quotient(a: Bound, b: Bound) -> Bound:
    """a / b for b > 0."""
    if a == 0 or b == math.inf:
        return 0.0
    if isinstance(a, float) and (isinstance(b, float) or math.isinf(a)):
        return a / b if isinstance(b, float) else a
    return simple(a / b)


def _outward(bound: Bound, error: float) -> Bound:
    """``bound`` up by a relative ``error``, or down where that is negative; not past 0."""
    if not has_sign(bound):
        return math.copysign(math.inf, error)
    return _product(bound, 1 + error if nonnegative(bound) else 1 - error)


def _valued(f: Callable[[float], float], x: float, otherwise: float) -> float:
    try:
        return float(f(x))
    except (OverflowError, ValueError):
        return otherwise
