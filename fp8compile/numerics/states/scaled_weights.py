"""FP16 master weights under one scale per tensor (FP8-LM, Peng et al. 2023).

    inv_scale = 2**(e - 5)        2**(e - 1) <= max(largest |x|, 1/8) < 2**e, when the master is made
    master    = x / inv_scale     in FP16: 16 ... 32 for the largest, or less where that is below 1/8
    x_hat     = master * inv_scale, exact

FP16 has 11 bits; a power of two costs none. The largest may grow 2047 times before it is past FP16, and becomes inf then,
which an optimizer's user sees; by the 1/8, weights that start at 0 may grow to 511. Normal numbers reach down to largest *
2**-19. So

    |x_hat - x| <  max(2**-10 |x|, 2**-24 inv_scale)     rounded stochastically, unbiased: half of it to nearest

and 2**-24 inv_scale is at most 2**-28 of the largest, or of 1/8. Stochastically, since to nearest a step of less than 2**-12
of a weight is lost. Two bytes: ``split_weights`` keeps 16 bits in one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8compile.numerics.formats import FP16_MAX
from fp8compile.numerics.rounding import nearest_bfloat16, round_stochastically

LEAST = 0.125  # a tensor's largest counts as this at least
OCTAVES = 5  # the largest is below 2**5 when the master is made


def inv_scale_for(largest: Tensor) -> Tensor:
    """The power of two, FP32, 0-d, of a tensor whose largest magnitude is ``largest``, 0-d and finite."""
    _, exponent = torch.frexp(largest.float().clamp_min(LEAST))
    return torch.ldexp(torch.ones_like(largest, dtype=torch.float32), exponent - OCTAVES)


def scaled(x: Tensor, inv_scale: Tensor, bits: Tensor | None = None) -> Tensor:
    """The FP16 master of x (float32): to nearest, or stochastically by ``bits`` (``rounding.random_bits``)."""
    y = x * inv_scale.reciprocal()  # exact
    if bits is None:
        return y.half()
    return torch.where(y.abs() > FP16_MAX, y.half(), round_stochastically(y, torch.float16, bits))  # which saturates


def weight_of(master: Tensor, inv_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The 16-bit weight nearest to a master."""
    x = unscaled(master, inv_scale)
    return (nearest_bfloat16(x) if dtype == torch.bfloat16 else x).to(dtype)


def unscaled(master: Tensor, inv_scale: Tensor) -> Tensor:
    """What a master stands for, FP32."""
    return master.float() * inv_scale
