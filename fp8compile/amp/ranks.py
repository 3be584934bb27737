"""Numbers that all ranks must agree on, so that they take one decision."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


def summed(numbers: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Summed over the ranks of a group (None: all), in place; as they are where torch.distributed is not in use."""
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(numbers, dist.ReduceOp.SUM, group=group)
    return numbers
