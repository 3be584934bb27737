"""How a loss scale follows what an update saw: the three modes as pure functions on tensors, without a host sync.

    static     scale stays
    dynamic    inf or nan found -> scale * backoff;  ``interval`` updates in a row without -> scale * growth
               (torch.amp.GradScaler: the same numbers, computed in float64 and rounded to float32 as it does)
    histogram  every ``period`` updates: h2 / (h1 + h2) > threshold -> halved, else doubled; nothing seen -> stays
               (Graphcore's automatic loss scaling: ``numerics.histogram.next_scale``). Once it has been halved it is doubled
               after ``interval`` decisions in a row that would have doubled it (1: Graphcore's rule)

Why an interval: with fewer gradients than 1 / threshold = 10^7, a single large one halves the scale. So Graphcore's rule
follows the largest gradient of each update, and doubles right after. The largest gradient is noise: in a small Llama
(3.4 * 10^6 a step, 10 seeds, after warm-up) it moves by a factor 1.5 (median) to 14 from step to step and by 8.5 to 23 in a
run, while its median over 20 steps moves by at most 2.5. With an interval the scale follows the largest gradient of the last
``interval`` decisions.

Then floor <= scale <= ceiling. A verdict goes with it: -1 the update was bad (a smaller scale was asked for, or a step was
skipped), +1 it was good, 0 it says nothing (the histogram's period is not over, or nothing was seen).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from fp8compile.numerics.histogram import THRESHOLD, next_scale


@dataclass(frozen=True)
class UpdateStats:
    """What an update saw, summed over ranks; 0-d tensors on one device.

    Attributes:
        small, large: h1 and h2, elements.
        found: float, > 0 where a step was skipped: inf or NaN in its gradients (histogram: NaN).
        bad_loss: float, > 0 where a loss was not finite before it was scaled: no scale helps then.
        vanished: gradients that became 0 when they were unscaled.
    """

    small: Tensor
    large: Tensor
    found: Tensor
    bad_loss: Tensor
    vanished: Tensor


@dataclass(frozen=True)
class PolicyState:
    """What a policy carries from update to update; 0-d tensors.

    Attributes:
        scale: float32.
        since: int32: updates since the scale last grew or fell (dynamic), or since the period began (histogram).
        small, large: float64: h1 and h2 of the period that is under way.
        quiet: int32: decisions in a row that would have doubled the scale (histogram); -1 until it is first halved.
    """

    scale: Tensor
    since: Tensor
    small: Tensor
    large: Tensor
    quiet: Tensor

    @classmethod
    def start(cls, scale: float, device: torch.device) -> PolicyState:
        zero = torch.zeros((), dtype=torch.float64, device=device)
        first = torch.full((), scale, dtype=torch.float32, device=device)
        since, quiet = (torch.full((), n, dtype=torch.int32, device=device) for n in (0, -1))
        return cls(first, since, zero, zero.clone(), quiet)

    def numbers(self) -> dict[str, Any]:
        """The fields as Python numbers, exactly. Waits for the device."""
        return {f.name: getattr(self, f.name).item() for f in fields(self)}

    def filled(self, **numbers: float) -> PolicyState:
        """A state with these numbers."""
        return PolicyState(**{name: torch.full_like(getattr(self, name), value) for name, value in numbers.items()})


class Policy(Protocol):
    """The rule of one mode."""

    def __call__(self, now: PolicyState, seen: UpdateStats) -> tuple[PolicyState, Tensor]:
        """The next state, and the verdict (a 0-d float64 tensor)."""
        ...


@dataclass(frozen=True)
class Static:
    """The scale stays; steps with inf or NaN are skipped."""

    floor: float
    ceiling: float

    def __call__(self, now: PolicyState, seen: UpdateStats) -> tuple[PolicyState, Tensor]:
        return now, torch.where(seen.found > 0, -1.0, 1.0).double()


@dataclass(frozen=True)
class Dynamic:
    """torch.amp.GradScaler's rule (its ``_amp_update_scale_``)."""

    growth: float
    backoff: float
    interval: int
    floor: float
    ceiling: float

    def __call__(self, now: PolicyState, seen: UpdateStats) -> tuple[PolicyState, Tensor]:
        found = seen.found > 0
        due = now.since + 1 == self.interval
        grown = (now.scale.double() * self.growth).float()
        grown = torch.where(due & torch.isfinite(grown), grown, now.scale)
        scale = torch.where(found, (now.scale.double() * self.backoff).float(), grown)
        since = torch.where(found | due, 0, now.since + 1).to(torch.int32)
        bounded = scale.clamp(self.floor, self.ceiling)
        return replace(now, scale=bounded, since=since), torch.where(found, -1.0, 1.0).double()


@dataclass(frozen=True)
class Histogram:
    """Graphcore's rule. A skipped step (NaN) counts as one with large gradients only, unless the loss was to blame."""

    period: int
    floor: float
    ceiling: float
    threshold: float = THRESHOLD
    interval: int = 64

    def __call__(self, now: PolicyState, seen: UpdateStats) -> tuple[PolicyState, Tensor]:
        blamed = seen.bad_loss > 0  # this update says nothing about the scale
        skipped = (seen.found > 0) & ~blamed
        small = torch.where(blamed | skipped, 0.0, seen.small)
        large = torch.where(skipped, (seen.small + seen.large).clamp_min(1.0), torch.where(blamed, 0.0, seen.large))
        h1, h2 = now.small + small, now.large + large
        due = now.since + 1 >= self.period
        lower, some = h2 > self.threshold * (h1 + h2), h1 + h2 > 0
        scale, quiet = self._decided(now, h1, h2, lower, some)
        verdict = torch.where(due & some, torch.where(lower, -1.0, 1.0), 0.0)
        verdict = torch.where((seen.found > 0) | blamed, -1.0, verdict).double()
        since = torch.where(due, 0, now.since + 1).to(torch.int32)
        scale, quiet = torch.where(due, scale, now.scale), torch.where(due, quiet, now.quiet)
        return PolicyState(scale, since, torch.where(due, 0.0, h1), torch.where(due, 0.0, h2), quiet), verdict

    def _decided(
        self, now: PolicyState, h1: Tensor, h2: Tensor, lower: Tensor, some: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The scale and ``quiet`` after a decision."""
        scale = next_scale(now.scale, h1, h2, self.floor, self.ceiling, self.threshold)
        settled, higher = now.quiet >= 0, some & ~lower
        waits = settled & higher & (now.quiet + 1 < self.interval)
        quiet = torch.where(waits, now.quiet + 1, torch.where(settled & some, 0, now.quiet))
        quiet = torch.where(lower, 0, quiet).to(torch.int32)
        return torch.where(waits, now.scale, scale), quiet
