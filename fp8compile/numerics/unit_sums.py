"""Probabilities that were stored as codes: what is decoded is divided by its sum, which is 1 in theory.

    q = p + e                   p: a softmax's result, e: the error of its codes
    p~ = q / s,  s = sum(q)     along the dimension of the softmax

The backward of a softmax is dx = p (g - sum(p g)). Rows of dx sum to sum(p g) (1 - sum(p)), which is zero. With q they sum to
sum(q g) (1 - s). Where dx is later summed along rows (the gradient of what all keys share, such as a position or a token's
type), all else cancels and this is what is left. With p~ rows sum to zero again.

Error of one element, d the sum of e (so s = 1 + d):

    before    |q - p|  = |e|
    after     |p~ - p| = |e - p d| / (1 + d) <= (|e| + p |d|) / (1 + d)

The second term is a factor that a whole row shares. In E4M3 |d| <= 1/16, as |e| <= p / 16. In INT8, where a group of 128 lies
within a row and a is its largest element: an element below a / 254 comes back as 0, any other less than twice as large, and
the largest as it was. So a group's sum is at least max(a, T - 128 a / 254) >= 0.66 T and at most 4/3 T, where T was its sum:
2/3 <= s <= 4/3, up to the scale's rounding.

A sum outside of ``LEAST`` ... ``MOST`` says that a group held other rows that were far larger (they are short,
or the softmax is along another dimension), or that a row is not one. Such
a row stays as it was decoded. So does a row of zeros (fully masked: 0 in, 0 out), and one with a NaN or an inf in it, whose
other elements keep their values. Within, |p~ - p| <= 2 (|e| + p |d|).
"""

from __future__ import annotations

import torch
from torch import Tensor

LEAST, MOST = 0.5, 2.0


def with_unit_sums(q: Tensor, dim: int) -> Tensor:
    """Decoded probabilities that sum to 1 along ``dim`` again, where their sum is within ``LEAST`` ... ``MOST``.

    Args:
        q: FP32, not negative, any shape.
        dim: the dimension along which they were made to sum to 1.

    Returns:
        FP32, in the shape of ``q``. Sums are 1 up to FP32's rounding: (n + 3) 2**-24 for n elements.
    """
    total = q.sum(dim, keepdim=True)
    known = (total >= LEAST) & (total <= MOST)  # False for NaN
    return q * torch.where(known, total, 1.0).reciprocal()
