"""The model of these tests: two linears around a GELU."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Plain(nn.Module):
    """``[..., 32]`` to ``[..., 32]``."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(F.gelu(self.a(x)))
        return y
