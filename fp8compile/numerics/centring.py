"""The result of attention, stored as its distance from a centre that all tokens share.

    c = the mean of O over tokens      one for each sequence, head and channel
    codes of O - c, and c;             decoded: O~ = (O - c)~ + c

The backward of attention takes dS = P (dP - D), dP_ij = dO_i . v_j and D_i = dO_i . O_i, where O_i is the mean of the v_j by
P_i: so rows of dS sum to zero. An error e_i of O_i makes D_i off by dO_i . e_i, and row i of dS sums to minus that. What dS
is made of is dO_i . (v_j - O_i), the distance of values from their mean. Where a row attends to much the same values as
others (similar tokens, the first layers, a cross attention that has not learned yet) these distances are small beside O_i,
and an error that is a share of O_i is as large as they are.

What all tokens have in common cancels in dS: rows of P sum to 1, so softmax(S) (V - c) = O - c, and V - c and O - c give the
same dP - D for any c. So the error may as well be a share of O - c, which is small where these distances are:

    before   |e| <= amax(O) / 254          the amax of a group, in INT8
    after    |e| <= amax(O - c) / 254      at most amax(O) + amax(c); the RMS about the mean is never above that of O

c is the mean of ``SAMPLES`` tokens or up to twice as many, evenly spaced. Where tokens are independent, the variance about it
is 1 + 1 / SAMPLES times that about the mean of all, 0.07 dB. Of O one token in S / SAMPLES is read for it. It is rounded to
BF16 before it is subtracted, so what is added is what was taken away. Smoothing of keys by their mean (Zhang et al. 2024,
SageAttention, arXiv 2410.02367) uses the same freedom of the softmax, for logits.

A mean that is not finite, or beyond 2**100, is no centre: 0 is taken. So an inf or a NaN spoils its own group and no other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8compile.numerics.scaling import rounded_to_bf16

SAMPLES = 64
LARGEST = 2.0**100  # BF16's largest value, more than that away from a centre, is still a number in FP32


def less_centre(x_NSC: Tensor) -> tuple[Tensor, Tensor]:
    """The distance from the centre, and the centre.

    Args:
        x_NSC: N sequences of S tokens of C channels; any float dtype of at most 32 bits.

    Returns:
        FP32 ``[N, S, C]``, and BF16 ``[N, 1, C]``.
    """
    step = max(1, x_NSC.shape[1] // SAMPLES)
    mean_N1C = torch.ops.aten.slice.Tensor(x_NSC, 1, 0, None, step).float().mean(1, keepdim=True)
    centre_N1C = rounded_to_bf16(torch.where(mean_N1C.abs() < LARGEST, mean_N1C, 0.0))
    return x_NSC.float() - centre_N1C, centre_N1C.to(torch.bfloat16)


def with_centre(x_NSC: Tensor, centre_N1C: Tensor, dtype: torch.dtype) -> Tensor:
    """``x + centre`` in ``dtype``, saturating at its largest finite value as ``dequantize`` does; NaN stays NaN."""
    limit = torch.finfo(dtype).max
    return (x_NSC + centre_N1C.float()).clamp(-limit, limit).to(dtype)
