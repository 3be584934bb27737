"""A small training in FP16 that is watched, and its lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 8


def chain(*names: str) -> nn.Sequential:
    """Linears by these names, with a ReLU behind the first, in FP16."""
    torch.manual_seed(0)
    model = nn.Sequential()
    for name in names:
        model.add_module(name, nn.Linear(WIDTH, WIDTH))
        if name == names[0]:
            model.add_module("act", nn.ReLU())
    return model.half()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def batch(step: int, times: float = 1.0) -> Tensor:
    """FP16 ``[4, WIDTH]``, the same for a step."""
    return (torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)) * times).half()


def loss_of(model: nn.Module, x: Tensor, times: float = 1.0) -> Tensor:
    loss: Tensor = model(x).float().pow(2).mean() * times
    return loss


def lines_of(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    """All lines of a rank's file, read strictly."""
    return [json.loads(line, parse_constant=_refuse) for line in text_of(folder, rank).splitlines()]


def steps_of(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    return [line for line in lines_of(folder, rank) if "step" in line]


def text_of(folder: Path, rank: int = 0) -> str:
    return (folder / f"rank{rank}.jsonl").read_text()


def _refuse(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")
