"""How large a weight can be after an optimizer's next step, whatever its gradient: predicted scales (MOSS, arXiv 2511.05811).

    amax' <= (decay * amax + D) (1 + r) + s         D: the largest step;  r, s: how far rounding for storage moves a value
    Adam      D = lr sqrt(1 - b2^t) / (1 - b1^t) * sqrt(b1^2 q^2 / b2 + (1 - b1)^2 / (1 - b2)),   q = max |m| / sqrt(v)
    Lion      D = lr
    RMSProp   D = lr / sqrt(1 - a),  with momentum lr (mu max |b| + 1 / sqrt(1 - a))

Adam's is Cauchy and Schwarz for one step from states as they are: of m' = b1 m + (1 - b1) g and v' = b2 v + (1 - b2) g^2

    |m'| <= sqrt(b2 v + (1 - b2) g^2) * sqrt(b1^2 m^2 / (b2 v) + (1 - b1)^2 / (1 - b2))     for each g

and it is reached, at g = (1 - b1) b2 v / ((1 - b2) b1 m). Over exact states from zero it repeats to the known
q^2 <= (1 - b1)^2 / (1 - b2) * sum (b1^2 / b2)^i, 7.27 for the usual betas. States that are *decoded* from codes do not obey
that sum: each has its codec's error, which for a small element of a group is no fraction of it. So q is not derived but
measured, of the states as the next step will decode them; then nothing is assumed of the codec.

Roundings in FP32. ``1 - b^t`` loses places to a power that is off by a few ulp of 1: POWER covers it on both sides. Of m' and
v' each operation is off by u = 2^-24 of operands that the bound holds too, a dozen of them: ROUNDED. g^2 may underflow: v'
is then too small by less than TINY, and sqrt(v') by less than sqrt(2 TINY) < SMALLEST_EPS sqrt(1 - b2^t), no more than what
stands beside it in the denominator. Hence the conditions of ``adam_has_a_bound``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8compile.numerics.formats import Format
from fp8compile.numerics.rounding import GRIDS
from fp8compile.numerics.scaling import E8M0, inv_scale_of, inv_scale_value

TINY = 2.0**-120
SMALLEST_EPS = 1e-12
SMALLEST_REST = 1e-4  # of 1 - b: FP32 knows the power of a larger b to too few places
POWER = 2.0**-20
ROUNDED = 2.0**-10  # relative


def adam_has_a_bound(beta1: float, beta2: float, eps: float) -> bool:
    """Whether ``adam_step`` holds, and does not grow without end (b1^2 < b2)."""
    rests = min(1 - beta1, 1 - beta2)
    return beta1**2 < beta2 and rests >= SMALLEST_REST and eps >= SMALLEST_EPS


def adam_reach(m: Tensor, v: Tensor) -> Tensor:
    """``|m| / sqrt(v)`` of each element, 0 where both are; NaN where a state is."""
    return m.abs() / (v + TINY).sqrt()


def adam_step(
    reach: Tensor, lr: Tensor, beta1: Tensor, beta2: Tensor, rests: tuple[Tensor, Tensor], t: Tensor
) -> Tensor:
    """D of Adam's step ``t``; ``rests`` are 1 - b1 and 1 - b2 as the step takes them."""
    rest1, rest2 = (1 - beta1**t) - POWER, (1 - beta2**t) + POWER
    old = (beta1 + POWER) * reach * (1 + ROUNDED)
    ratio = (old * old / beta2 + rests[0] * rests[0] / rests[1]).sqrt() * (1 + ROUNDED)
    return lr.abs() * rest2.sqrt() / rest1 * ratio


def rmsprop_step(reach: Tensor, lr: Tensor, rest: Tensor, momentum: Tensor) -> Tensor:
    """D of RMSProp's step; ``reach`` is the largest magnitude in its momentum, ``rest`` 1 - a."""
    return lr.abs() * (momentum * reach + rest.rsqrt()) * (1 + ROUNDED)


def largest_after(amax: Tensor, decay: Tensor, step: Tensor, dtypes: tuple[torch.dtype, ...]) -> Tensor:
    """The largest magnitude after a step of at most ``step``, rounded to these dtypes one after the other: up or down at
    random, so by less than a place of theirs."""
    bound = (decay.abs() * amax + step) * (1 + ROUNDED)
    for dtype in dtypes:
        if grid := GRIDS.get(dtype):
            smallest = 2.0 ** (grid.smallest_normal - 127 - grid.mantissa)
            bound = bound * (1 + 2.0**-grid.mantissa) + smallest
    return bound


def power_of_two_for(largest: Tensor, fmt: Format) -> Tensor:
    """The inv_scale, FP32, under which no magnitude up to ``largest`` is clipped: the least power of two; NaN where it is not
    finite.

    A power of two moves no value but in the exponent. So codes of normal values stand for the same numbers under each scale
    that clips nothing: how far a prediction is off changes only where subnormals begin.
    """
    return inv_scale_value(inv_scale_of(largest, fmt, E8M0))
