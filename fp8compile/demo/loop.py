"""The training loop: forward, backward, clip, AdamW, next rate; the same for every arm.

The model stays in training mode while it is evaluated: without dropout both modes compute the same, and a
mode that does not change makes nothing recompile. A step is timed until its loss has reached the host.
In FP16 the loss is scaled (``scaling``), and a run that has diverged stops.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8compile.demo import arms, compiling, loss_scales
from fp8compile.demo.data import Corpus, train_batches, validation_batches
from fp8compile.demo.loss_scales import Scaler
from fp8compile.demo.model import Size, build_optimizer, rate_schedule
from fp8compile.demo.precision import Precision
from fp8compile.demo.results import Evaluation, Run
from fp8compile.demo.saved_bytes import saved_bytes_of_step

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


def train(run: Run, model: torch.nn.Module, step_model: StepModel, task: Task, tell: Callable[[], None]) -> None:
    """Train ``model`` through ``step_model``, recording all in ``run``; ``tell`` is called after a step.

    Raises:
        DivergenceError: in the arms of ``arms.SCALED_ARMS``.
    """
    size, device = task.size, task.device
    optimizer = build_optimizer(model, size.rate)
    scaler = loss_scales.scaler_for(run.arm) if run.arm in arms.SCALED_ARMS else None
    taken = loss_scales.steps_taken(optimizer)
    rate = rate_schedule(task.steps)
    set_rate(optimizer, size.rate * rate(0))
    validation = [tokens.to(device) for tokens in task.validation()]
    evaluate(run, model, validation, task)
    for tokens in train_batches(task.corpus.train, size.batch, size.length, run.seed, task.steps):
        batch = tokens.to(device)
        if scaler is not None:
            run.scales.append(scaler.get_scale())
        start = time.perf_counter()
        loss = train_step(model, step_model, batch, optimizer, task, scaler)
        run.step_seconds.append(time.perf_counter() - start)
        run.losses.append(loss)
        run.skipped = len(run.losses) - len(taken)
        if scaler is not None:
            loss_scales.check_finite(loss, "the loss")
        set_rate(optimizer, size.rate * rate(len(run.losses)))
        if len(run.losses) == 1:
            after_first_step(run, model, step_model, batch, task)
        if len(run.losses) in task.evaluation_steps:
            evaluate(run, model, validation, task)
        tell()
    if device.type == "cuda":
        run.peak_bytes = torch.cuda.max_memory_allocated(device)


def train_step(
    model: torch.nn.Module,
    step_model: StepModel,
    tokens: Tensor,
    optimizer: torch.optim.Optimizer,
    task: Task,
    scaler: Scaler | None = None,
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
    """What can be asked once all is compiled: bytes saved, the report; peak memory counts from here."""
    with task.precision.autocast(task.device):
        run.saved_bytes = saved_bytes_of_step(step_model, model, tokens)
    run.report = compiling.report_of(run.arm, step_model)
    if task.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(task.device)
