"""Signal to quantisation noise: how far a stored value is from the value it stands for.

SQNR(x, x')    20 log10(|x| / |x - x'|)    in dB; 6.02 dB are a bit of a uniform grid
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sqnr(reference: Tensor, approximation: Tensor) -> float:
    """The SQNR of two tensors of one shape in dB, in float64.

    inf where they are equal, -inf where the approximation is not finite or the reference is 0, NaN where the reference is not
    finite.
    """
    return decibels(power(reference), power(reference.double() - approximation.double()))


def decibels(signal: float, noise: float) -> float:
    """10 log10(signal / noise) of two powers: inf without noise, -inf for no signal or infinite noise; NaN for an infinite
    signal."""
    if signal == math.inf:
        return math.nan
    if noise == 0:
        return math.inf
    return -math.inf if signal == 0 or noise == math.inf else 10 * (math.log10(signal) - math.log10(noise))


def power(value: Tensor) -> float:
    """The sum of squares; inf where anything is not finite."""
    norm = float(torch.linalg.vector_norm(value.detach(), dtype=torch.float64))
    return norm * norm if math.isfinite(norm) else math.inf
