"""One matmul for a sum of several, whose operands have scales of their own.

    sum_i dy_i W_i  =  sum_i g_i w_i (codes of dy_i) (codes of W_i)       g_i, w_i: their inv_scales

A scaled matmul of all of them, [dy_1 dy_2 ...] [W_1; W_2; ...], has one pair of scales. So each w_i moves into the scale
that dy_i is encoded under, and no W_i changes:

    w    = max_i w_i
    g    = max_i g_i w_i / w          the matmul's two scales
    g'_i = g w / w_i  >=  g_i         what dy_i is encoded under: nothing is clipped that g_i would not clip

Error: a code of dy_i is off by at most ``max(|dy_i| half_ulp, g'_i smallest / 2)`` (numerics/scaling.py). The second part
times an element of W_i, at most 448 w_i, is 224 g w smallest: the same for all i, a part of the largest product of two
amaxes. So what is lost of a dy_i that meets a small W_i is lost beside the sum that it goes into. What reads dy_i itself
(wgrad) keeps g_i.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

NOT_UNROLLED = 8  # Inductor writes reductions of fewer elements out


def balanced(gradients: Sequence[Tensor], weights: Sequence[Tensor], w: Tensor) -> tuple[Tensor, ...]:
    """``(g, *g')`` of the inv_scales g_i, w_i and w, float32 ``[1, 1]``, each at least ``SMALLEST_INV_SCALE`` or NaN.

    Ratios come first, and g'_i is at most the largest finite number: a weight of zeros has the smallest scale, and its
    gradient's codes are zeros then. A NaN makes all of them NaN, as it would make the sum.

    The maximum is a reduction, not written out: Inductor then lets each gradient's own kernel write its part of
    ``[dy_1 dy_2 ...]``. Of values without one behind them it makes all parts anew, in a kernel for that alone.
    """
    products = torch.cat([each * (own / w) for each, own in zip(gradients, weights, strict=True)])
    g = torch.nn.functional.pad(products, (0, 0, 0, max(0, NOT_UNROLLED - len(weights)))).amax(0, keepdim=True)
    largest = torch.finfo(g.dtype).max
    return (g, *((g * (w / own)).clamp_max(largest) for own in weights))
