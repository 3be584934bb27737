"""One iteration of a loss scaler: what is collected between two updates, and what may be called when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from fp8compile._distributed import sum_over_ranks
from fp8compile.amp.binding import Binding
from fp8compile.amp.buckets import IGNORED, Division, buckets_of
from fp8compile.amp.gradients import gradients_of, takes_fp32
from fp8compile.amp.histogram import Counter, parameters_seen
from fp8compile.amp.losses import are_bad
from fp8compile.amp.policies import SEEN, UpdateStats

READY, UNSCALED, STEPPED = "ready", "unscaled", "stepped"


@dataclass
class OptimizerStage:
    """The state of one optimizer since the last update. ``found`` is 0-d and > 0 where inf or NaN stop its step."""

    at: str = READY
    found: list[Tensor] = field(default_factory=list)

    def found_ever(self) -> Tensor:
        """> 0 where an evaluation found inf or NaN: 0-d float64, of its own memory."""
        first, *more = self.found
        return sum(more, first.double())


class Iteration:
    """From one update to the next. All tensors stay on the device.

    Args:
        clips: whether gradients are counted and clipped (the histogram mode).

    Attributes:
        fp16: whether the backward of a loss seen so far has FP16 gradients.
        interrupted: whether a step of it raised LossScaleCollapse and was not called again: its gradients were unscaled
            for nothing, and a loss that is scaled now begins the next iteration.
        closed_counts: ``[2]`` each, h1 and h2: the last counts of the iteration, put there by the scaler before ``sum_up``.
    """

    def __init__(self, clips: bool) -> None:
        self.clips, self.fp16 = clips, False
        self.interrupted = False
        self.closed_counts: list[Tensor] = []
        self._stages: dict[int, OptimizerStage] = {}
        self._bad_losses: list[Tensor] = []
        self._counts: list[Tensor] = []

    def stage(self, optimizer: torch.optim.Optimizer) -> OptimizerStage:
        return self._stages.setdefault(id(optimizer), OptimizerStage())

    @property
    def is_empty(self) -> bool:
        """Whether no gradient was looked at."""
        return not any(stage.found for stage in self._stages.values())

    @property
    def has_begun(self) -> bool:
        """Whether a loss was scaled, or a gradient looked at."""
        return bool(self._bad_losses) or not self.is_empty

    def losses(self, losses: Sequence[Tensor], device: torch.device) -> None:
        """Take note of losses that are about to be scaled."""
        self._bad_losses += are_bad(losses, device)

    def check_unscale(self, stage: OptimizerStage) -> None:
        """Raises RuntimeError where ``unscale_`` must not be called."""
        if stage.at == UNSCALED:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        if stage.at == STEPPED:
            raise RuntimeError("unscale_() is being called after step(): call update() first.")
        if not self._bad_losses:
            raise RuntimeError("no loss was scaled since the last update(), so gradients are not scaled either: propagate "
                               "scaler.scale(loss)")  # fmt: skip

    @torch.no_grad()
    def unscale(self, optimizer: torch.optim.Optimizer, scale: Tensor, binding: Binding, counter: Counter) -> None:
        """Count, clip, divide and check an optimizer's gradients. Raises RuntimeError where it has none."""
        stage = self.stage(optimizer)
        binding.by_parameters(p for group in optimizer.param_groups for p in group["params"])
        gradients = gradients_of(optimizer)
        if not gradients:
            raise RuntimeError("no parameter of this optimizer has a gradient: call scaler.scale(loss).backward() before "
                               "(and finish() of fp8compile.amp.accumulate)")  # fmt: skip
        seen = parameters_seen(binding.adding()) if self.clips else set()
        looks = counter.looks(gradients, seen) if self.clips else [IGNORED] * len(gradients)
        division = Division(scale, self.clips, takes_fp32(optimizer))
        for bucket in buckets_of(gradients, looks):
            division.of(bucket)
        self._counts += [each.to(scale.device, non_blocking=True) for each in division.counts]
        stage.found.append(division.found_on(scale.device))
        stage.at = UNSCALED

    def sum_up(self, device: torch.device, group: dist.ProcessGroup | None) -> UpdateStats:
        """What was seen, on all ranks."""
        numbers = torch.zeros(len(SEEN), dtype=torch.float64, device=device)
        bins, counts = numbers[:2], numbers[:3]
        for several, place in ((self.closed_counts, bins), (self._counts, counts), (self._bad_losses, numbers[4])):
            for each in several:
                place.add_(each)
        for stage in self._stages.values():
            for each in stage.found:
                numbers[3].add_(each)
        return UpdateStats(sum_over_ranks(numbers, group))
