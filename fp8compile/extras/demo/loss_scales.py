"""Loss scales in the demo's FP16 arms: which scaler, what a step does with it, and when a run has diverged.

    static 1, 2^7, 2^15, 2^22    the scale stays; a step with an inf or NaN among its gradients is skipped
    dynamic                      torch.amp.GradScaler's rule and defaults: 2^16, halved at an inf, doubled after 2000 steps
    histogram                    fp8compile.amp.LossScaler's own: halved or doubled depending on how many gradients are large

A run has *diverged* if

    a training loss, a validation loss or a parameter is not finite, or the scaler raised LossScaleCollapse: it stops there,
    or its last validation loss made less than a tenth of the progress that FP32 made from the same seed:
        end > start - 0.1 * (start of fp32 - end of fp32);  without a run of fp32 to compare with, end >= start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fp8compile.extras.demo.arms import DYNAMIC, STATIC

LEAST_PROGRESS = 0.1
DIVERGED = "diverged"


class GradScalerLike(Protocol):
    """The part of torch.amp.GradScaler's interface that is used."""

    def scale(self, outputs: Tensor) -> Tensor: ...
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None: ...
    def step(self, optimizer: torch.optim.Optimizer) -> object: ...
    def update(self) -> None: ...
    def get_scale(self) -> float: ...


class DivergenceError(ArithmeticError):
    """A run need not go on; the message says why."""


def scaler_for(arm: str) -> GradScalerLike:
    """The scaler of one of ``arms.SCALED_ARMS``."""
    from fp8compile.amp import LossScaler

    if arm in STATIC:
        return LossScaler(mode="static", init_scale=STATIC[arm])
    return LossScaler(mode="dynamic", init_scale=2.0**16) if arm == DYNAMIC else LossScaler(mode="histogram")


def steps_taken(optimizer: torch.optim.Optimizer) -> list[None]:
    """A list that grows by one with every step of the optimizer; steps that a scaler skips are missing."""
    taken: list[None] = []
    optimizer.register_step_post_hook(lambda *_: taken.append(None))
    return taken


def apply_gradients(
    loss: Tensor,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    clip_norm: float,
    scaler: GradScalerLike | None,
) -> None:
    """Backward, clip, step.

    Raises:
        DivergenceError: the scale collapsed.
    """
    if scaler is None:
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
    else:
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        _step(scaler, optimizer)
    optimizer.zero_grad(set_to_none=True)


def _step(scaler: GradScalerLike, optimizer: torch.optim.Optimizer) -> None:
    from fp8compile.amp import LossScaleCollapse

    try:
        scaler.step(optimizer)  # raises what the previous update() found
        scaler.update()
    except LossScaleCollapse as error:
        raise DivergenceError(f"the loss scale collapsed to {error.scale:g}") from error


def check_finite(loss: float, what: str) -> None:
    """Raises DivergenceError where a loss is inf or NaN."""
    if not math.isfinite(loss):
        raise DivergenceError(f"{what} is {loss}")


def check_parameters(model: torch.nn.Module) -> None:
    """Raises DivergenceError where a parameter has an inf or NaN."""
    for name, p in model.named_parameters():
        if not bool(torch.isfinite(p).all()):
            raise DivergenceError(f"{name} is not finite")


@dataclass(frozen=True)
class Ends:
    """The validation losses of a run before its first step and after its last."""

    start: float
    end: float


def made_progress(run: Ends, reference: Ends | None) -> bool:
    """Whether a run got anywhere; see the head of this file."""
    if not math.isfinite(run.end):
        return False
    if reference is None:
        return run.end < run.start
    return run.end <= run.start - LEAST_PROGRESS * (reference.start - reference.end)


@dataclass(frozen=True)
class Course:
    """Where a scale was after the learning rate's warm-up, and after its own, which ends where it first does not rise.

    Attributes:
        lowest, highest: the extremes over all those steps.
        median: their median.
        within_4: the share of those steps whose scale is at most a factor 2 from the median: a factor 4 from end to end.
    """

    lowest: float
    highest: float
    median: float
    within_4: float

    @property
    def factor(self) -> float:
        return self.highest / self.lowest if self.lowest else math.inf


def course(scales: Sequence[float], warm_up: int) -> Course | None:
    """The course of the scale at each step; None if no step is left after ``warm_up`` steps and the scale's initial rise."""
    risen = next((k for k in range(1, len(scales)) if scales[k] <= scales[k - 1]), len(scales))
    later = sorted(scales[max(warm_up, risen) :])
    if not later:
        return None
    median = later[len(later) // 2]
    near = sum(median / 2 <= scale <= 2 * median for scale in later)
    return Course(later[0], later[-1], median, near / len(later))


def power_text(scale: float) -> str:
    """A scale for people: 2^15, or 1e+03 where it is no power of two."""
    exponent = math.log2(scale) if scale > 0 else math.nan
    return f"2^{exponent:.0f}" if exponent.is_integer() else f"{scale:.3g}"
