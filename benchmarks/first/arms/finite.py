"""When and where a training stops being finite: ``nan WAY OPTIMIZER``, two layers of Llama-1B's shape."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from benchmarks.first.arms.training import SIX_LAYERS, Training
from benchmarks.first.measuring import Measure
from benchmarks.first.speaking import Told
from benchmarks.first.ways import compiled

STEPS = 60


def run(told: Told, way: str, optimizer: str) -> None:
    measure = Measure(told)
    training = Training(measure, dataclasses.replace(SIX_LAYERS, layers=2), 4, optimizer, None)
    training.call = compiled(way, training.model, measure.device)
    losses: list[float] = []
    bad: dict[str, Any] | None = None
    for step in range(4 if measure.tiny else STEPS):
        loss = training.forward()
        loss.backward()
        losses.append(round(float(loss.detach()), 5))
        if bad := _not_finite(training, step, losses[-1]):
            break
        training.optimizer.step()
        training.optimizer.zero_grad()
    told.say("nan", shape=training.shape(), losses=losses[::4] + losses[-3:], bad=bad)


def _not_finite(training: Training, step: int, loss: float) -> dict[str, Any] | None:
    named = list(training.model.named_parameters())
    gradients = {n: [int((~p.grad.isfinite()).sum()), p.numel()] for n, p in named if not _finite(p.grad)}
    weights = [name for name, parameter in named if not _finite(parameter)]
    if not gradients and not weights and math.isfinite(loss):
        return None
    return {"step": step, "loss": str(loss), "gradients": gradients, "weights": weights, "of": len(named)}


def _finite(tensor: torch.Tensor) -> bool:
    return bool(tensor.isfinite().all())
