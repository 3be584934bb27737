"""Pipelining: two compiled stages on two ranks; and the same two stages, one after the other, in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from tests.support.parallel import OPTIONS, STEPS, Net, Scaler, Setup, Trained, loss_of, result

MICRO, ROWS = 4, 8
SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}


class Stage(nn.Module):
    """A part of ``Net`` under the whole model's paths, so that checkpoints and reports keep their names."""

    def __init__(self, net: Net, blocks: Sequence[int], head: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(i): net.blocks[i] for i in blocks})
        self.head = net.head if head else None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else torch.as_tensor(self.head(x))


def stages(setup: Setup) -> list[nn.Module]:
    net = setup.net()
    parts = [Stage(net, [0], head=False), Stage(net, [1], head=True)]
    for each in parts:
        each.compile(backend="fp8compile", options={**OPTIONS, **setup.options})
    return list(parts)


def batch(setup: Setup, step: int) -> tuple[Tensor, Tensor]:
    """One batch, of whose rows each micro-batch takes ``ROWS / MICRO``."""
    parts = [setup.batch(0, 0, 10 * step + i) for i in range(ROWS // 4)]
    x, labels = (torch.cat(each) for each in zip(*parts, strict=True))
    return x, labels


def pipeline(setup: Setup, schedule: str) -> Trained:
    """This rank's stage, driven by a schedule of ``torch.distributed.pipelining``."""
    rank = dist.get_rank()
    part = stages(setup)[rank]
    optimizer, scaler = setup.optimizer(part), Scaler(setup.dtype)
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    plan: Any = SCHEDULES[schedule](stage, MICRO, loss_fn=lambda y, labels: loss_of(y, labels) * scaler.get_scale())
    losses = []
    for step in range(STEPS):
        x, labels = batch(setup, step)
        found: list[Tensor] = []
        # the scaler asks for a loss, which a stage may not have, and which torch also computes of uninitialised memory
        scaler.scale(torch.zeros(()))
        if rank == 0:
            plan.step(x)
        else:
            plan.step(target=labels, losses=found)
        losses.append([each.item() for each in found])
        scaler.step(optimizer)
    return result(part, part, optimizer, losses, scaler)


def in_one_process(setup: Setup) -> tuple[Trained, Trained]:
    """Both stages here, micro-batch after micro-batch; gradients are summed, then divided by their number."""
    parts = stages(setup)
    optimizers = [setup.optimizer(part) for part in parts]
    scaler = Scaler(setup.dtype)
    losses = []
    for step in range(STEPS):
        x, labels = batch(setup, step)
        found = []
        for rows, wanted in zip(x.chunk(MICRO), labels.chunk(MICRO), strict=True):
            loss = scaler.scale(loss_of(parts[1](parts[0](rows)), wanted))
            loss.backward()
            found.append(loss.item())
        losses.append(found)
        for p in (p for part in parts for p in part.parameters()):
            assert p.grad is not None
            p.grad /= MICRO
        scaler.step(*optimizers)
    first, second = (result(part, part, o, losses, scaler) for part, o in zip(parts, optimizers, strict=True))
    return first, second
