"""What an optimizer keeps, which its own step and a whole training step are measured by."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8compile.reporting.memory import storage_bytes


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all that an optimizer keeps."""
    return storage_bytes(t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor))
