"""One run of a task of ``loss_scaling_tasks`` with one way to scale the loss, and its verdict.

    compile the task's model, once in FP32 and once in FP16; each run copies its own initial parameters into one of the two

Arms are the demo's (``fp8compile.extras.demo.arms``): fp32 in FP32 by Inductor, the others in FP16 throughout by fp8compile's
default recipe. Optimizers are ours with FP32 moments in every arm; FP16 parameters are rounded stochastically. The loss is
FP32, from FP16 logits. Rates warm up and decay as in the demo. Divergence: ``fp8compile.extras.demo.loss_scales``.
"""

from __future__ import annotations

import copy
import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.papers.fp16_on_cpu import fp16_in_fp32
from benchmarks.studies.loss_scaling_tasks import Training
from fp8compile.amp import LossScaler
from fp8compile.extras.demo import arms, compiling, loss_scales
from fp8compile.extras.demo.loop import set_rate
from fp8compile.extras.demo.model import rate_schedule
from fp8compile.fx.aot import BACKWARD
from fp8compile.numerics.histogram import AMAX


class Learner(nn.Module):
    """A model and its loss, in FP32, so that both are compiled together."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        out = self.model(inputs)
        logits = getattr(out, "logits", out).float()
        loss = F.cross_entropy(logits.flatten(0, -2), target.flatten())
        return loss, logits.detach()


class Models:
    """A task and its model, compiled once for all arms of one dtype: with another scale the code is the same.

    Args:
        training: the task.
        compiled: False: without Inductor.
    """

    def __init__(self, training: Training, compiled: bool = True) -> None:
        fp16_in_fp32()
        self.training, self.compiled = training, compiled
        self._made: dict[torch.dtype, tuple[Learner, Callable[..., Any]]] = {}
        compiling.forget_compiled()

    def start(self, arm: str, seed: int) -> tuple[Learner, Callable[..., Any]]:
        """The model with the parameters of a seed, and what a training step calls."""
        dtype, fresh = compiling.dtype_of(arm), Learner(self.training.model(seed))
        if dtype not in self._made:
            learner = copy.deepcopy(fresh).to(dtype)
            self._made[dtype] = learner, self._step_model(arm, learner)
        learner, step_model = self._made[dtype]
        learner.load_state_dict(fresh.state_dict())
        learner.zero_grad(set_to_none=True)
        gc.collect()  # the scaler of the run before, which its statistics belong to
        return learner.train(), step_model

    def _step_model(self, arm: str, learner: Learner) -> Callable[..., Any]:
        options = {} if self.compiled else {"debug.codegen": "eager"}
        return compiling.compile_arm(
            arm if self.compiled or arm in arms.SCALED_ARMS else arms.EAGER, learner, options
        )


@dataclass
class Row:
    """What a run left; ``end`` and ``accuracy`` are None where the run stopped before its end.

    Attributes:
        largest: of each step, the largest finite FP16 gradient that the scaler saw, divided by the scale, or 0.
    """

    status: str = "done"
    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    largest: list[float] = field(default_factory=list)
    skipped: int = 0
    start: float = math.nan
    end: float | None = None
    accuracy: float | None = None
    seconds: float = 0.0


def run(arm: str, seed: int, models: Models, steps: int) -> Row:
    """Train one arm from one seed; a run that diverges stops."""
    training = models.training
    learner, step_model = models.start(arm, seed)
    optimizer = training.optimizer(
        learner, state_format="fp32", master="none", compiled=models.compiled, lr=training.rate
    )
    scaler = loss_scales.scaler_for(arm) if arm in arms.SCALED_ARMS else None
    row, began = Row(), time.perf_counter()
    row.start = evaluate(learner, training)[0]
    try:
        _train(row, learner, step_model, optimizer, scaler, training, seed, steps)
        loss_scales.check_parameters(learner)
        row.end, row.accuracy = evaluate(learner, training)
        loss_scales.check_finite(row.end, "the validation loss")
    except loss_scales.DivergenceError as why:
        row.status = f"{loss_scales.DIVERGED} at step {len(row.losses)}: {why}"
    row.seconds = time.perf_counter() - began
    return row


def _train(
    row: Row,
    learner: Learner,
    step_model: Callable[..., Any],
    optimizer: torch.optim.Optimizer,
    scaler: loss_scales.GradScalerLike | None,
    training: Training,
    seed: int,
    steps: int,
) -> None:
    rate, taken = rate_schedule(steps), loss_scales.steps_taken(optimizer)
    dtype = next(learner.parameters()).dtype
    for step, (inputs, target) in enumerate(training.batches(seed, steps)):
        set_rate(optimizer, training.rate * rate(step))
        row.scales += [scaler.get_scale()] if scaler is not None else []
        loss, _ = step_model(_cast(inputs, dtype), target)
        row.losses.append(float(loss.detach()))
        loss_scales.check_finite(row.losses[-1], "the loss")
        loss_scales.apply_gradients(loss, learner, optimizer, training.clip_norm, scaler)
        row.largest += [_largest(scaler) / row.scales[-1]] if isinstance(scaler, LossScaler) else []
        row.skipped = step + 1 - len(taken)


def _largest(scaler: LossScaler) -> float:
    """The largest finite gradient of the last step, as it was scaled."""
    pairs = [(row, stats) for o in scaler.observations for row, stats in zip(o.rows, o.history[-1][1], strict=True)]
    return max(
        (float(stats[AMAX]) for row, stats in pairs if row.direction == BACKWARD and row.dtype == "f16"), default=0.0
    )


@torch.no_grad()
def evaluate(learner: Learner, training: Training) -> tuple[float, float]:
    """Loss and accuracy on what was held out, by the eager model."""
    dtype = next(learner.parameters()).dtype
    losses, hits, known = [], 0, 0
    learner.eval()
    for inputs, target in training.held_out():
        loss, logits = learner(_cast(inputs, dtype), target)
        losses.append(float(loss))
        hits += int((logits.argmax(-1) == target).sum())
        known += target.numel()
    learner.train()
    return sum(losses) / len(losses), hits / known


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x
