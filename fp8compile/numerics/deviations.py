"""A value that a norm reads, as its deviation: what the norm itself makes of it, and back.

    z = (x - mean) scale,   x = z / scale + mean        or with a divisor:  z = (x - mean) / scale,   x = z scale + mean

A code of z is off by a share of z's own group: of the deviation, where a code of x is off by a share of x, which may be any
number of deviations away from zero. The statistics are exact, so x - mean comes back as z does, but for FP32's rounding of
x itself, which eager's x has too. Where the statistics are one number each over a group, codes have a scale for it anyway,
and z = x - mean.

Where z is exactly 0, as for a channel without any spread, x comes back as its mean and x - mean as 0.
"""

from __future__ import annotations

from torch import Tensor


def deviation(x: Tensor, mean: Tensor | None, scale: Tensor | None, divides: bool) -> Tensor:
    """``z`` in FP32.

    Args:
        x: any shape; any float dtype of at most 32 bits.
        mean, scale: broadcast over ``x``; None for 0 and for 1.
        divides: whether ``scale`` divides.
    """
    z = x.float() if mean is None else x.float() - mean.float()
    if scale is None:
        return z
    return z / scale.float() if divides else z * scale.float()


def from_deviation(z: Tensor, mean: Tensor | None, scale: Tensor | None, divides: bool) -> Tensor:
    """The FP32 value whose ``deviation`` is ``z``."""
    if scale is not None:
        z = z * (scale.float() if divides else scale.float().reciprocal())
    return z if mean is None else z + mean.float()
