"""The training loop: forward, backward, clip, AdamW, next rate; the same for every arm.

The model stays in training mode while it is evaluated: without dropout both modes compute the same, and a
mode that does not change makes nothing recompile. A step is timed until its loss has reached the host.
In FP16 the loss is scaled (``loss_scales``), and a run that has diverged stops.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8compile.extras.demo import arms, compiling, loss_scales
from fp8compile.extras.demo.data import Corpus, train_batches, validation_batches
from fp8compile.extras.demo.loss_scales import GradScalerLike
from fp8compile.extras.demo.model import Size, build_optimizer, rate_schedule
from fp8compile.extras.demo.precision import Precision
from fp8compile.extras.demo.results import Evaluation, Run
from fp8compile.extras.demo.saved_bytes import saved_bytes_of_step

CLIP_NORM = 1.0
EVALUATIONS = 5
StepModel = Callable[..., Any]


@dataclass(frozen=True)
class Task:
    """What every run trains on; runs differ in arm and seed only."""

    size: Size
    precision: Precision
    corpus: Corpus
    device: torch.device
    steps: int

    @property
    def evaluation_steps(self) -> tuple[int, ...]:
        """Steps after which the validation loss is taken: before the first, evenly to the last."""
        return tuple(sorted({round(self.steps * k / EVALUATIONS) for k in range(EVALUATIONS + 1)}))

    def validation(self) -> list[Tensor]:
        size = self.size
        return validation_batches(self.corpus.validation, size.batch, size.length, size.validation_windows)


class Training:
    """One arm from one seed under way: model, compiled code, optimizer, scaler, and its place in the batches.

    It shares nothing with another arm, so arms may take their steps in turns (``turns``): an arm's losses are the same, bit
    for bit, with and without other arms.

    Args:
        run: filled as it goes.
        model: the uncompiled module, which is evaluated.
        step_model: what a training step calls; its parameters are ``model``'s.
        task: what it trains on.

    Raises:
        DivergenceError: in the arms of ``arms.SCALED_ARMS``.
    """

    def __init__(self, run: Run, model: torch.nn.Module, step_model: StepModel, task: Task) -> None:
        self.run, self.model, self.step_model, self.task = run, model, step_model, task
        self.optimizer = build_optimizer(model, task.size.rate)
        self.scaler = loss_scales.scaler_for(run.arm) if run.arm in arms.SCALED_ARMS else None
        self._taken = loss_scales.steps_taken(self.optimizer)
        self._rate = rate_schedule(task.steps)
        self._validation = [tokens.to(task.device) for tokens in task.validation()]
        size = task.size
        self._batches = train_batches(task.corpus.train, size.batch, size.length, run.seed, task.steps)
        self._set_rate()
        evaluate(run, model, self._validation, task)

    def step(self) -> None:
        """One step on the next batch, and the evaluation due after it.

        Raises:
            DivergenceError: the loss, the scale or a parameter shows that the run need not go on.
        """
        run, batch = self.run, next(self._batches).to(self.task.device)
        if self.scaler is not None:
            run.scales.append(self.scaler.get_scale())
        taken, start = len(self._taken), time.perf_counter()
        loss = train_step(self.model, self.step_model, batch, self.optimizer, self.task, self.scaler)
        run.step_seconds.append(time.perf_counter() - start)
        run.losses.append(loss)
        if len(self._taken) == taken:
            run.skipped_steps.append(len(run.losses))
        if self.scaler is not None:
            loss_scales.check_finite(loss, "the loss")
        self._set_rate()
        if len(run.losses) == 1:
            after_first_step(run, self.model, self.step_model, batch, self.task)
        if len(run.losses) in self.task.evaluation_steps:
            evaluate(run, self.model, self._validation, self.task)

    def _set_rate(self) -> None:
        set_rate(self.optimizer, self.task.size.rate * self._rate(len(self.run.losses)))


def train(run: Run, model: torch.nn.Module, step_model: StepModel, task: Task, tell: Callable[[], None]) -> None:
    """Train one arm alone, to its end; ``tell`` is called after each step.

    Raises:
        DivergenceError: in the arms of ``arms.SCALED_ARMS``.
    """
    training = Training(run, model, step_model, task)
    for _ in range(task.steps):
        training.step()
        tell()


def train_step(
    model: torch.nn.Module,
    step_model: StepModel,
    tokens: Tensor,
    optimizer: torch.optim.Optimizer,
    task: Task,
    scaler: GradScalerLike | None = None,
) -> float:
    """One optimizer step; returns the loss of the batch before it, nats per byte."""
    with task.precision.autocast(task.device):
        loss = step_model(input_ids=tokens, labels=tokens).loss
    loss_scales.apply_gradients(loss, model, optimizer, CLIP_NORM, scaler)
    return float(loss.detach())


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def evaluate(run: Run, model: torch.nn.Module, validation: list[Tensor], task: Task) -> None:
    """Append the mean validation loss of the eager ``model`` to ``run``."""
    start = time.perf_counter()
    with torch.no_grad(), task.precision.autocast(task.device):
        losses = [float(model(input_ids=tokens, labels=tokens).loss) for tokens in validation]
    mean = sum(losses) / len(losses)
    run.evaluations.append(Evaluation(len(run.losses), mean, time.perf_counter() - start))
    if run.scales:
        loss_scales.check_finite(mean, "the validation loss")
        loss_scales.check_parameters(model)


def after_first_step(run: Run, model: torch.nn.Module, step_model: StepModel, tokens: Tensor, task: Task) -> None:
    """Measure what is known once everything is compiled: bytes saved, the report."""
    with task.precision.autocast(task.device):
        run.saved_bytes = saved_bytes_of_step(step_model, model, tokens)
    run.report = compiling.report_of(run.arm, step_model)
