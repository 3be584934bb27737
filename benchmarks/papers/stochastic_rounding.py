"""FP16 weights updated to nearest or at random: a small ResNet on handwritten digits, SGD, batch 4.

    arithmetic   forward and backward in FP32 or FP16, rounding to nearest; a convolution of FP16 operands accumulates in
                 FP32 and is rounded once, as GPUs do it (a CPU's own are slow)
    update       FP32: weights (a copy of them, under FP16 arithmetic) in FP32;   fp8compile.optim.SGD(master="fp32")
                 FP16, nearest: weights and step in FP16;                         torch.optim.SGD
                 FP16, stochastic: FP16 weights, the step in FP32, then SR;       fp8compile.optim.SGD(master="none")

Neither momentum, nor weight decay, nor loss scaling; GroupNorm, since a batch is 4.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fp8compile.extras.demo.extras import MissingExtra
from fp8compile.optim import SGD

BATCH, CLASSES, HELD_OUT_ONE_IN = 4, 10, 5
DTYPES = {"FP32": torch.float32, "FP16": torch.float16}
ARMS = tuple((a, u) for a in DTYPES for u in ("FP32", "FP16 nearest", "FP16 stochastic"))


class Conv(nn.Conv2d):
    """A convolution without bias that accumulates in FP32; the result, and both gradients, have the operands' dtype."""

    def __init__(self, inside: int, width: int, kernel: int, stride: int = 1) -> None:
        super().__init__(inside, width, kernel, stride, kernel // 2, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        y: Tensor = self._conv_forward(input.float(), self.weight.float(), None)
        return y.to(input.dtype)


class BasicBlock(nn.Module):
    """ResNet's basic block, the shortcut a 1 x 1 convolution where the width changes."""

    def __init__(self, inside: int, width: int) -> None:
        super().__init__()
        stride = 1 if inside == width else 2
        self.conv_1, self.conv_2 = Conv(inside, width, 3, stride), Conv(width, width, 3)
        self.norm_1, self.norm_2 = nn.GroupNorm(4, width), nn.GroupNorm(4, width)
        self.shortcut = nn.Identity() if inside == width else Conv(inside, width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm_1(self.conv_1(x)))
        return F.relu(self.norm_2(self.conv_2(y)) + self.shortcut(x))


def resnet(widths: Sequence[int] = (16, 32, 64)) -> nn.Module:
    """CIFAR's ResNet with one block per stage: 8 layers for three widths."""
    stem = [Conv(1, widths[0], 3), nn.GroupNorm(4, widths[0]), nn.ReLU()]
    blocks = [BasicBlock(a, b) for a, b in zip((widths[0], *widths), widths, strict=False)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], CLASSES))


@dataclass(frozen=True)
class Images:
    """Images [n, 1, 8, 8] in [-1, 1] and their classes; every fifth is held out."""

    train: tuple[Tensor, Tensor]
    held_out: tuple[Tensor, Tensor]


def load_images() -> Images:
    """scikit-learn's handwritten digits.

    Raises:
        MissingExtra: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise MissingExtra("the images are scikit-learn's digits: pip install scikit-learn") from None
    found = load_digits()
    x, y = torch.from_numpy(found.images).float()[:, None] / 8 - 1, torch.from_numpy(found.target).long()
    held = torch.arange(len(y)) % HELD_OUT_ONE_IN == 0
    return Images((x[~held], y[~held]), (x[held], y[held]))


def optimizer_of(update: str, model: nn.Module, rate: float, compiled: bool) -> torch.optim.Optimizer:
    """What updates the weights of an arm; ``compiled``: the rounding, which is slow operation by operation."""
    if update == "FP16 nearest":
        return torch.optim.SGD(model.parameters(), lr=rate)
    if update == "FP32":
        return SGD(model.parameters(), lr=rate, master="fp32", compiled=False)
    return SGD(model.parameters(), lr=rate, master="none", compiled=compiled)


def train(arithmetic: str, update: str, rate: float, seed: int, images: Images, steps: int) -> dict[str, Any]:
    """One run; the rate decays to a tenth along a cosine."""
    torch.manual_seed(seed)
    dtype = DTYPES[arithmetic]
    kept = dtype if update == "FP32" else torch.float16
    model = resnet().to(kept)
    optimizer = optimizer_of(update, model, rate, compiled=steps > 100)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, rate / 10)
    generator, losses = torch.Generator().manual_seed(seed), []
    start = time.perf_counter()
    for _ in range(steps):
        chosen = torch.randint(len(images.train[1]), (BATCH,), generator=generator)
        loss = F.cross_entropy(_logits(model, images.train[0][chosen], dtype), images.train[1][chosen])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.detach())
    with torch.no_grad():
        logits = _logits(model, images.held_out[0], dtype)
    last = torch.stack(losses)[-max(1, steps // 10) :]
    return {
        "arithmetic": arithmetic,
        "update": update,
        "rate": rate,
        "seed": seed,
        "accuracy": float((logits.argmax(1) == images.held_out[1]).float().mean()),
        "held_out_loss": float(F.cross_entropy(logits, images.held_out[1])),
        "train_loss": float(last.mean()),
        "seconds": time.perf_counter() - start,
    }


def _logits(model: nn.Module, x: Tensor, dtype: torch.dtype) -> Tensor:
    """FP32 logits; weights and images enter the arithmetic in ``dtype``, whatever the weights are kept in."""
    weights = {name: p.to(dtype) for name, p in model.named_parameters()}
    logits: Tensor = functional_call(model, weights, (x.to(dtype),))
    return logits.float()
