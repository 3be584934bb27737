"""Products of INT8 codes: a scale for each row of the left operand, and one for each column of the right one.

    y = inv_a (a b) inv_b       a [M, K], b [K, N]  INT8       a b [M, N]  INT32, exact
                                inv_a [M, 1], inv_b [1, N]  FP32

A scale that is one along the contracted dimension leaves the sum, so the product of codes is one call of ``torch._int_mm``.
Jetfire (Xi et al. 2024, 2403.12422) has a scale per 32 x 32 block: a call for each 32 of the contracted dimension, and a
sum of as many dequantised products. With 128 in their place that already takes as long as the product in BF16 or longer,
where it was measured (benchmarks/results/int8-linears-cpu.json). So 32 x 32 is emulated, and what is multiplied has rows.

**Sums are exact up to MOST_PRODUCTS products.** A code is at most 127, so K of them sum to at most 127**2 K, which INT32
holds for K <= (2**31 - 1) / 127**2 = 133,144. A longer contracted dimension is cut into parts, whose products are summed in
FP32.

Error of an element, x [K] a row of the left operand without inf and NaN, w [K] a column of the right one, decoded to FP32:

    |y - x w| <= inv_a / 2 |w|_1 + inv_b / 2 |x|_1 + K inv_a inv_b / 4        inv_a = max|x| / 127, inv_b = max|w| / 127

since a code is off by half a step at most, and the roundings of an INT32 sum to FP32 and of two products, 2**-24 of y each.
An inf or NaN in an operand makes its scale NaN, and so all elements of y that the row or column enters. Where |a b| inv_a is
past FP32's largest value the result is inf: for operands of some 2**128 / 127 K, whatever the other one's scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8compile.numerics.formats import INT8

MOST_PRODUCTS = (2**31 - 1) // int(INT8.max) ** 2
PART = MOST_PRODUCTS // 16 * 16  # of a longer contracted dimension


def int8_product(
    a: Tensor, b: Tensor, inv_a: Tensor, inv_b: Tensor, dtype: torch.dtype, added: Tensor | None = None
) -> Tensor:
    """The product of decoded operands, ``[M, N]`` in ``dtype``; ``added``, a bias, is added in FP32.

    Args:
        a, b: codes ``[M, K]`` and ``[K, N]``, on a device that ``torch._int_mm`` knows; K is no symbol.
        inv_a, inv_b: their FP32 scales, ``[M, 1]`` and ``[1, N]``.
        dtype: a float dtype. What its largest value is less than becomes inf, as in a product in ``dtype``.
        added: broadcasts to ``[M, N]``.
    """
    parts = (
        zip(torch.split(a, PART, 1), torch.split(b, PART, 0), strict=True) if a.shape[1] > MOST_PRODUCTS else [(a, b)]
    )
    first, *others = (torch._int_mm(left, right).float() for left, right in parts)
    y = sum(others, first) * inv_a * inv_b
    return (y if added is None else y + added).to(dtype)
