"""Gradients in FP8 under one scale per tensor that all ranks share, and mu, which is adapted (FP8-LM, Peng et al. 2023).

    inv_scale = amax / (FMAX * mu)      amax: the tensor's largest magnitude on any rank
    code      = saturate(g / inv_scale)

mu = 1 clips nothing. A larger one clips the largest gradients, and moves the smallest further above FP8's last subnormal.
After each step: if more than 0.001 % of all elements were clipped, mu is halved, and else doubled over 1000 steps. It stays
in 1 ... 2**16: below 1 it would give range away and clip no less. NaN and infinities count as not clipped: they make their
tensor NaN, and mu goes on as it was.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8compile.numerics.formats import Format
from fp8compile.numerics.scaling import inv_scale_of

MOST_CLIPPED = 1e-5  # the paper's 0.001 %
STEPS_TO_DOUBLE = 1000
MU_RANGE = (1.0, 2.0**16)


def next_mu(mu: Tensor, clipped: Tensor, total: Tensor) -> Tensor:
    """mu after a step in which ``clipped`` of ``total`` elements were clipped, summed over ranks; 0-d FP32 each."""
    grown = mu * 2.0 ** (1 / STEPS_TO_DOUBLE)
    return torch.where(clipped > MOST_CLIPPED * total, mu * 0.5, grown).clamp(*MU_RANGE)


def shared_inv_scale(amax: Tensor, mu: Tensor, fmt: Format) -> Tensor:
    """The inv_scale of tensors whose largest magnitudes, of all ranks, are ``amax`` ``[T]``; NaN where that is not finite."""
    return inv_scale_of(amax / mu, fmt)


def clipped_in(g: Tensor, inv_scale: Tensor, fmt: Format) -> Tensor:
    """How many finite elements of g are past the largest code, 0-d."""
    a = g.abs()
    return ((a > inv_scale * (fmt.max * (1 + 2.0**-20))) & (a < torch.inf)).sum()
