"""The model of these tests, two linears around a GELU, its data, and a count of how often weights are encoded."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8compile.linears import weight_codes


class Plain(nn.Module):
    """``[..., 32]`` to ``[..., 32]``."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(F.gelu(self.a(x)))
        return y


def data(step: int = 0) -> Tensor:
    return torch.randn(24, 32, generator=torch.Generator().manual_seed(step))


@contextmanager
def count() -> Iterator[list[int]]:
    """How many weights are encoded; warnings of changes that no one saw are errors."""
    found, encode = [0], weight_codes.encode

    def counting(*args: Any) -> tuple[Tensor, ...]:
        found[0] += 1
        return encode(*args)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setattr(weight_codes, "encode", counting)
        warnings.filterwarnings("error", message="a weight of an FP8 linear")
        yield found
