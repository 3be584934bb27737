"""What a computation in chunks needs beside the computation itself: an order, and sums over chunks in FP32."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor


def after(x: Tensor, *done: Tensor) -> Tensor:
    """``x``, as a value that can only be computed once ``done`` are there.

    x + 0, where the zero says that none of them has a first element above infinity; NaN is not above it either. Equal to
    ``x`` for all values of ``done``, tensors with one element at least; -0 becomes 0.
    """
    if not done:
        return x
    late = functools.reduce(torch.logical_or, (each.reshape(-1).narrow(0, 0, 1) > math.inf for each in done))
    return x + late.to(x.dtype)


def matmul_unrounded(a: Tensor, b: Tensor) -> Tensor:
    """``a [M, K] @ b [K, N]`` in the dtype in which a matmul of these dtypes is summed: FP32 for FP16 and BF16.

    A product of two 16-bit numbers is exact in FP32, so a CPU, whose matmul has no other result than its operands' dtype,
    multiplies them as FP32 numbers.
    """
    if a.dtype not in (torch.float16, torch.bfloat16):
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
