"""How long the training will take, printed before its first step: an estimate, from eager steps timed on this machine.

    seconds = sum over runs of  steps * step + evaluations * batches of an evaluation * step / 3

step: forward and backward of one batch, uncompiled. An evaluation has one of its three matmuls per weight. Compiling comes on
top; how long it takes is only known afterwards.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8compile.extras.demo.compiling import dtype_of
from fp8compile.extras.demo.loop import Task

REPEATS = 3
LIMIT_S = 3.0
FORWARD_SHARE = 1 / 3


@dataclass(frozen=True)
class Estimate:
    """Seconds of all runs, compilation left out, and of the eager step of each dtype that it is made from."""

    seconds: float
    step_s: dict[torch.dtype, float]


def estimate(model: torch.nn.Module, task: Task, arms: Sequence[str], seeds: int) -> Estimate | None:
    """The estimate for ``seeds`` runs of each arm; None where an uncompiled step does not fit into the card's memory.

    Args:
        model: FP32, uncompiled; it stays as it is.
    """
    tokens = task.validation()[0].to(task.device)
    try:
        step_s = {dtype: _step_seconds(model, dtype, tokens, task) for dtype in dict.fromkeys(map(dtype_of, arms))}
    except torch.OutOfMemoryError:
        return None
    evaluated = len(task.evaluation_steps) * task.size.validation_windows / task.size.batch
    steps = task.steps + evaluated * FORWARD_SHARE
    return Estimate(seeds * steps * sum(step_s[dtype_of(arm)] for arm in arms), step_s)


def clock(seconds: float) -> str:
    """Seconds, minutes or hours, as exact as an estimate is: "40 s", "4 min", "2.5 h"."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _step_seconds(model: torch.nn.Module, dtype: torch.dtype, tokens: Tensor, task: Task) -> float:
    """The median of a few steps, without the first unless that alone takes ``LIMIT_S``."""
    one = copy.deepcopy(model).to(dtype)
    times = [_timed(one, tokens, task)]
    while len(times) <= REPEATS and sum(times) < LIMIT_S:
        times.append(_timed(one, tokens, task))
    return statistics.median(times[1:] or times)


def _timed(model: Any, tokens: Tensor, task: Task) -> float:
    start = time.perf_counter()
    with task.precision.autocast(task.device):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    if task.device.type == "cuda":
        torch.cuda.synchronize(task.device)
    seconds = time.perf_counter() - start
    model.zero_grad(set_to_none=True)
    return seconds
