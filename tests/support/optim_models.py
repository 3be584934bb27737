"""Small models, their data, and a loop, shared by the optimizer tests."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

WIDE = 128  # a row is one group


def small_model(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    """One matrix of whole groups, one whose rows end in a short one, biases that are kept whole."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDE, WIDE), nn.GELU(), nn.Linear(WIDE, 130), nn.GELU(), nn.Linear(130, 64))
    return model.to(dtype)


def batches(steps: int, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [
        (torch.randn(32, WIDE, generator=g).to(dtype), torch.randn(32, 64, generator=g).to(dtype))
        for _ in range(steps)
    ]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: list[tuple[Tensor, Tensor]],
    after: Callable[[], None] | None = None,
) -> list[float]:
    """The losses; gradients are left in place after the last step."""
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = (model(x).float() - y.float()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if after:
            after()
    return losses


def parameters_of(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]
