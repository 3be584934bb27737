"""A mean that is kept as a mean, so that no sum can overflow (Graphcore's running-mean gradient accumulation).

    M_k = (k - 1) / k * M_{k-1} + g_k / k          M_0 = 0;  M_k is the mean of g_1 ... g_k, and |M_k| <= max |g|

In FP32 a step adds at most three roundings to M, and later steps shrink them by (k - 1) / k each. After n steps the error is
at most sum_k (k / n) * 3 * 2**-24 * max|g| = 1.5 (n + 1) * 2**-24 * max|g|: 9e-5 of max|g| after 1,000, under a fifth of
FP16's last place. In 16 bits each step is rounded stochastically, so that M is unbiased. Rounded to nearest, what a
step adds would be lost once g / k is less than half of M's last place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8compile.numerics.rounding import drawn, index_like, key_of, round_stochastically


def fold_mean(mean: Tensor, new: Tensor, count: int) -> Tensor:
    """The mean of ``count`` values from that of ``count - 1`` and the newest: float32, of any floating dtypes.

    Args:
        mean: any shape; for ``count`` 1, anything finite.
        new: the same shape.
        count: 1 or more.
    """
    if count < 1:
        raise ValueError(f"count={count}: the number of values with the new one, 1 or more")
    return mean.float() * ((count - 1) / count) + new.float() * (1 / count)


def rounded_mean(mean: Tensor, dtype: torch.dtype, *, seed: int, stream: int, step: int, first: int = 0) -> Tensor:
    """A float32 mean in ``dtype``: as it is in float32, rounded stochastically in bfloat16 and float16.

    Args:
        seed, stream, step: these select the random numbers; no two roundings may share all three.
        first: the number of the first element, where ``mean`` is a part of a larger tensor.

    Raises:
        ValueError: another dtype.
    """
    if dtype == torch.float32:
        return mean
    mean = mean.contiguous()
    key = key_of(seed, stream, torch.full((), step, dtype=torch.int64, device=mean.device))
    index = index_like(mean.shape, torch.full((), first, dtype=torch.int64, device=mean.device))
    return round_stochastically(mean, dtype, drawn(dtype, index, key))
