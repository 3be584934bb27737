"""Small models and runs that the tests of loss scaling share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fp8compile.amp import LossScaler


def net(dtype: torch.dtype = torch.float16, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)


def batch(i: int, dtype: torch.dtype = torch.float16, rows: int = 6) -> Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(i)).to(dtype)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().pow(2).mean()


def sgd(model: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def train(
    scaler: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[int],
    poison: Callable[[int, nn.Module], None] = lambda i, model: None,
    dtype: torch.dtype = torch.float16,
) -> list[float]:
    """The scale after each step; ``poison`` may spoil gradients after the backward."""
    scales = []
    for i in steps:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, batch(i, dtype))).backward()
        poison(i, model)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def spoil(value: float, when: Iterable[int]) -> Callable[[int, nn.Module], None]:
    """Put ``value`` into a gradient at these steps."""
    steps = set(when)

    def poison(i: int, model: nn.Module) -> None:
        if i in steps:
            p = next(model.parameters())
            assert p.grad is not None
            p.grad.view(-1)[3] = value

    return poison


def grown(scaler: LossScaler, scale: float) -> LossScaler:
    """With this scale as if it had come to it."""
    scaler.load_state_dict({**scaler.state_dict(), "scale": scale})
    return scaler


def counted(several: Iterable[Tensor]) -> list[float]:
    """The statistics of some tensors together, by numpy: small, large, inf, nan, zero, subnormal, amax."""
    v = np.abs(np.concatenate([each.detach().double().numpy().ravel() for each in several]))
    finite = v[np.isfinite(v)]
    with np.errstate(invalid="ignore"):
        which = (v <= 8192, (v > 8192) & np.isfinite(v), np.isinf(v), np.isnan(v), v == 0, (v > 0) & (v < 2.0**-14))
    return [*(float(each.sum()) for each in which), float(finite.max()) if finite.size else 0.0]
