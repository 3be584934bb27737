"""One iteration of a loss scaler: what is collected between two updates, and what may be called when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from fp8compile._distributed import sum_over_ranks
from fp8compile.amp.binding import Binding
from fp8compile.amp.gradients import clip, count_nonzero_fp16, gradients_of, unscale, widened
from fp8compile.amp.histogram import Counter, parameters_seen
from fp8compile.amp.losses import count_bad
from fp8compile.amp.policies import UpdateStats

READY, UNSCALED, STEPPED = "ready", "unscaled", "stepped"


@dataclass
class Stage:
    """The state of one optimizer since the last update. ``found`` is 0-d and > 0 where inf or NaN stop its step."""

    at: str = READY
    found: list[Tensor] = field(default_factory=list)


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
        self._stages: dict[int, Stage] = {}
        self._bad_losses: list[Tensor] = []
        self._vanished: list[Tensor] = []

    def stage(self, optimizer: torch.optim.Optimizer) -> Stage:
        return self._stages.setdefault(id(optimizer), Stage())

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
        self._bad_losses.append(count_bad(losses, device))

    def check_unscale(self, stage: Stage) -> None:
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
        if self.clips:
            seen = parameters_seen(binding.adding())
            self.closed_counts.append(counter.of_gradients(gradients, seen, scale.device))
            clip(gradients)
        gradients = widened(gradients, optimizer)
        before = count_nonzero_fp16(gradients, scale.device)
        stage.found.append(unscale(gradients, scale))
        self._vanished.append(before - count_nonzero_fp16(gradients, scale.device))
        stage.at = UNSCALED

    def sum_up(self, device: torch.device, group: dist.ProcessGroup | None) -> UpdateStats:
        """What was seen, on all ranks."""
        small, large = torch.stack([torch.zeros(2, dtype=torch.float64, device=device), *self.closed_counts]).sum(0)
        founds = [each.double() for stage in self._stages.values() for each in stage.found]
        sums = [torch.stack(each).sum() for each in (founds, self._bad_losses, self._vanished)]
        return UpdateStats(*sum_over_ranks(torch.stack([small, large, *sums]), group).unbind())
