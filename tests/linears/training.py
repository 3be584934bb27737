"""What tests of delayed scaling train: small batches that grow and shrink, on a model with one graph or several."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

import fp8compile
from fp8compile.linears import history
from tests.support.measure import compiled

LENGTH = 4
DELAYED = {"linears.scaling": "delayed", "linears.emulate": True, "saved": "off", "linears.amax_history_len": LENGTH}


def data(step: int, micro: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(1000 * step + micro)
    return torch.randn(24, 32, generator=g) * (1 + 0.2 * (step % 5))


def own(model: nn.Module) -> history.Histories:
    ((_, found),) = fp8compile.tools.scaling_state(model).graphs
    return found


def train(
    model: nn.Module,
    run: Callable[[Tensor], Tensor],
    steps: int,
    scale: Callable[[int], float] = lambda _: 1.0,
) -> Iterator[float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(steps):
        optimizer.zero_grad()
        loss = (run(data(step) * scale(step)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        yield float(loss.detach())


def steps_of(model: nn.Module, n: int) -> list[Tensor]:
    list(train(model, compiled(model, **DELAYED), n))
    return [p.detach().clone() for p in model.parameters()]
