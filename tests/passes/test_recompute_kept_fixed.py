"""recompute_kept: what one value is made again from stays kept, though it could itself be made from another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.support.graphs import split_of


class Chain(nn.Module):
    """c = x W, b = tanh(c), a = sigmoid(b) ..., each the input of a product whose wgrad needs it."""

    def __init__(self, length: int, size: int = 64) -> None:
        super().__init__()
        self.first = nn.Linear(size, size, bias=False)
        self.reads = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in range(length))

    def forward(self, x: Tensor) -> Tensor:
        value = self.first(x)
        total = torch.zeros_like(value)
        for i, read in enumerate(self.reads):
            total = total + read(value)
            value = torch.sigmoid(value) if i % 2 else torch.tanh(value)
        return total


@pytest.mark.parametrize("length", [3, 4, 5])
def test_every_second_value_of_a_chain_stays(length: int) -> None:
    """The last goes, made from the one before; that one stays, and the one before it goes ..."""
    split = split_of(Chain(length), torch.randn(128, 64), disabled="cut_for_bytes,encode_saved", linears="off")
    kept = [e for e in split.edges if e.is_tensor and not split.caller_owns(e.forward)]
    whole = [e for e in kept if e.forward.meta["val"].shape == (128, 64)]
    assert len(whole) == length - length // 2, [e.forward.name for e in whole]
