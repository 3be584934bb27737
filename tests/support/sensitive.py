"""A network of which one module is sensitive to rounding."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """Two linears, a batch norm, a head. ``offset`` is added to all that the second linear reads.

    The mean over the batch is taken away behind the second linear, so that the rows of its output's gradient sum to zero, and
    the offset cancels in the gradient of its weight; the error of the codes, a share of the largest element of a group, does
    not. Linear in the value that is encoded, and yet sensitive: no analysis of operations can know it, only the numbers do.
    """

    def __init__(self, offset: float = 0.0, dropout: float = 0.0) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(64, 64), nn.Linear(64, 64)
        self.norm, self.drop, self.head = nn.BatchNorm1d(64), nn.Dropout(dropout), nn.Linear(64, 64)
        with torch.no_grad():
            self.before.bias.add_(offset)
            self.after.weight.sub_(self.after.weight.mean(1, keepdim=True))  # its result does not know the offset

    def forward(self, x: Tensor) -> Tensor:
        y = self.after(self.before(x))
        return self.head(self.drop(torch.relu(self.norm(y - y.mean(0)))))


def squares(out: Tensor) -> Tensor:
    return out.square().sum()


def batch(rows: int = 256) -> Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(1))


SENSITIVE = 1000.0  # INT8 codes are off by up to 1000 / 254, E4M3 by up to 1000 / 16; what counts is of size 1
