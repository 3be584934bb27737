"""Scales of channels that move from an activation into the next weight, and change no product (Smooth-SwiGLU, Fishman et al.
2024, arXiv 2409.12517; half of the spread each, as SmoothQuant with alpha = 1/2, Xiao et al. 2022, arXiv 2211.10438).

    h [M, F], W [N, F]       y = h W' = (h / s) (W s)'
    a_f = max_m |h_mf|       e_f = floor(log2 a_f)        e = the mean of all e_f, rounded
    s_f = 2 ** min(MOST, floor((e_f - e) / 2))            1 where e_f <= e + 1

A channel that is 2**d times as large as most keeps half of d, and its column of W takes the other half: one scale for the
tensor then has 2**(d/2) to span on both sides, not 2**d on one. All of it on one side is no better: columns of W under
E4M3's smallest normal number cost the gradient of h what is gained (docs/guide/linears.md has both measured). Channels
that are smaller than most stay: to enlarge them would take bits from their columns of W.

Exact: a float times a power of two is that float with another exponent. It is rounded only under the smallest normal number,
2**-126 in FP32 and BF16, and infinite only above the largest, 2**128. With 1 <= s <= 2**MOST, that can touch only

    |h| < 2**(MOST - 126)     |W| >= 2**(128 - MOST)     |dW / s|, |dh s| likewise in what the matmuls add up

so no number between 2**-116 and 2**118 changes. FP16 has 2**-14 and 2**16 instead, which is too near: it is left alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

MOST = (
    10  # no scale is above 2**10: a spread of 2**20 then leaves 2**10 to each side, of E4M3's 2**14 of normal numbers
)
_MANTISSA_BITS, _BIAS, _NOT_FINITE = 23, 127, 255  # of FP32


def channel_amax(h: Tensor) -> Tensor:
    """``[..., F] -> [F]``: the largest magnitude of each channel, in h's dtype. NaN where one holds a NaN."""
    return h.abs().amax(tuple(range(h.dim() - 1)))


def channel_exponents(amax: Tensor) -> Tensor:
    """int32 ``[F]``: log2 of the scales s, 0 ... MOST, from amaxes ``[F]`` of any float dtype. Channels that are all zeros,
    subnormal in FP32, or not finite have 0 and no say."""
    biased = amax.float().view(torch.int32) >> _MANTISSA_BITS
    known = (biased > 0) & (biased < _NOT_FINITE)
    count = known.sum(dtype=torch.int32).clamp_min(1)
    twice = torch.where(known, biased, 0).sum(dtype=torch.int32) * 2
    mean = (twice + count).div(count * 2, rounding_mode="floor")
    above = torch.where(known, biased - mean, 0).clamp_min(0)
    return (above >> 1).clamp_max(MOST)


def _power_of_two(exponents: Tensor) -> Tensor:
    """FP32 ``2.0 ** exponents``, exactly, for -126 ... 127."""
    return ((exponents + _BIAS) << _MANTISSA_BITS).view(torch.float32)


def multiplied(x: Tensor, exponents: Tensor) -> Tensor:
    """``x s`` in x's dtype, s along the last dimension."""
    return x * _power_of_two(exponents).to(x.dtype)


def divided(x: Tensor, exponents: Tensor) -> Tensor:
    """``x / s`` in x's dtype, s along the last dimension."""
    return x * _power_of_two(-exponents).to(x.dtype)


def smoothed_amax(amax: Tensor, exponents: Tensor) -> Tensor:
    """The amax, 0-d, of ``divided(h, exponents)``, from the amaxes ``[F]`` of h's channels, to the bit."""
    return divided(amax, exponents).amax()
