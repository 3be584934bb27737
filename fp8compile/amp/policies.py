"""How a loss scale follows what an update saw: the three modes as pure functions on tensors, without a host sync.

    static     scale stays
    dynamic    inf or nan found -> scale * backoff;  ``interval`` updates in a row without -> scale * growth
               (torch.amp.GradScaler: the same numbers, computed in float64 and rounded to float32 as it does)
    histogram  every ``period`` updates: h2 / (h1 + h2) > threshold -> halved, else doubled; nothing seen -> stays
               (Graphcore's automatic loss scaling). Once it has been halved it is doubled
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

import itertools
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fp8compile.numerics.histogram import THRESHOLD

SEEN = ("small", "large", "vanished", "found", "bad_loss")


@dataclass(frozen=True)
class UpdateStats:
    """What an update saw, summed over ranks.

    Attributes:
        numbers: float64 ``[5]``, by name as in ``SEEN``: h1 and h2, elements; gradients that became 0 when they were
            unscaled; > 0 where a step was skipped: inf or NaN in its gradients (histogram: NaN); > 0 where a loss was not
            finite before it was scaled: no scale helps then.
    """

    numbers: Tensor

    @property
    def found(self) -> Tensor:
        return self.numbers[SEEN.index("found")]


@dataclass(frozen=True)
class PolicyState:
    """What a policy carries from update to update; 0-d tensors.

    Attributes:
        scale: float32.
        since: float64: updates since the scale last grew or fell (dynamic), or since the period began (histogram).
        small, large: float64: h1 and h2 of the period that is under way.
        quiet: float64: decisions in a row that would have doubled the scale (histogram); -1 until it is first halved.
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
        return cls(first, zero.clone(), zero, zero.clone(), zero - 1)

    def numbers(self) -> dict[str, Any]:
        """The fields as Python numbers, exactly. Waits for the device."""
        numbers = {f.name: getattr(self, f.name).item() for f in fields(self)}
        return numbers | {name: int(numbers[name]) for name in ("since", "quiet")}

    def filled(self, **numbers: float) -> PolicyState:
        """A state with these numbers."""
        return PolicyState(**{name: torch.full_like(getattr(self, name), value) for name, value in numbers.items()})


class Policy(Protocol):
    """The rule of one mode."""

    def __call__(self, now: PolicyState, seen: UpdateStats) -> tuple[PolicyState, Tensor]:
        """The next state, and the verdict (a 0-d float64 tensor)."""
        ...


def _row(table: Tensor, bits: Tensor) -> Tensor:
    """The row of ``table``, ``[2, ..., 2, n]``, at these bits, bool ``[k]``. By indices of one element: the host would read
    those without a dimension."""
    return table[tuple(bits.long().unsqueeze(1))][0]


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

    _constants: dict[torch.device, Tensor] = field(default_factory=dict, compare=False, repr=False)

    def __call__(self, now: PolicyState, seen: UpdateStats) -> tuple[PolicyState, Tensor]:
        since = now.since + 1
        happened = torch.stack([seen.found > 0, since == self.interval])
        factor, keep, verdict = _row(self._on(happened.device), happened).unbind()
        scale = (now.scale * factor).float()
        scale = torch.where(scale < torch.inf, scale, now.scale).clamp(self.floor, self.ceiling)
        return replace(now, scale=scale, since=since * keep), verdict

    def _on(self, device: torch.device) -> Tensor:
        """``[2, 2, 3]``: by whether inf or NaN was found, and growth is due: factor, share of since, verdict."""
        if device not in self._constants:
            good = [[1.0, 1.0, 1.0], [self.growth, 0.0, 1.0]]
            rows = [good, [[self.backoff, 0.0, -1.0]] * 2]
            self._constants[device] = torch.tensor(rows, dtype=torch.float64, device=device)
        return self._constants[device]


class ScaleChange(NamedTuple):
    """What a decision comes to: the scale times ``factor``, ``keep * quiet + add`` for quiet, and the verdict."""

    factor: float
    keep: float
    add: float
    verdict: float


@dataclass(frozen=True)
class Histogram:
    """Graphcore's rule. A skipped step (NaN) counts as one with large gradients only, unless the loss was to blame.

    What happened is a few bits, and what they come to stands in a table: a lookup is one launch on a device.
    """

    period: int
    floor: float
    ceiling: float
    threshold: float = THRESHOLD
    interval: int = 64
    _constants: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict, compare=False, repr=False)

    def __call__(self, now: PolicyState, seen: UpdateStats) -> tuple[PolicyState, Tensor]:
        bins, happened = seen.numbers[:2], seen.numbers > 0
        some = happened[:2]
        if self.period > 1:
            bins = torch.stack([now.small, now.large]) + self._added(seen.numbers, happened)
            some = bins > 0
        lower = bins[1:] > self.threshold * bins.sum()
        table, edges = self._on(happened.device)
        outcome = _row(table, torch.cat([happened[3:], some, lower, now.quiet > edges]))
        factor, keep, add, verdict = outcome.unbind()
        scale = (now.scale * factor).clamp(self.floor, self.ceiling).float()
        quiet = torch.addcmul(add, now.quiet, keep)
        if self.period == 1:
            return replace(now, scale=scale, quiet=quiet), verdict
        return self._unless_under_way(now, scale, quiet, bins, verdict, happened[3:].any())

    def _added(self, numbers: Tensor, happened: Tensor) -> Tensor:
        """h1 and h2 of this update, ``[2]``."""
        *_, found, blamed = happened
        skipped = torch.stack([torch.zeros_like(numbers[0]), numbers[:2].sum().clamp_min(1.0)])
        added: Tensor = torch.where(found, skipped, numbers[:2]) * ~blamed
        return added

    def _unless_under_way(
        self, now: PolicyState, scale: Tensor, quiet: Tensor, bins: Tensor, verdict: Tensor, bad: Tensor
    ) -> tuple[PolicyState, Tensor]:
        """The state after a decision if the period is over, else the old one with the larger bins."""
        due = now.since + 1 >= self.period
        since = (now.since + 1) * ~due
        scale, quiet = torch.where(due, scale, now.scale), torch.where(due, quiet, now.quiet)
        verdict = torch.where(due | bad, verdict, 0.0)
        small, large = (bins * ~due).unbind()
        return PolicyState(scale, since, small, large, quiet), verdict

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The table ``[2, 2, 2, 2, 2, 2, 2, 4]``, and the edges of quiet above which it is settled, and has waited."""
        if device not in self._constants:
            rows = [self._outcome(*map(bool, bits)) for bits in itertools.product((0, 1), repeat=7)]
            table = torch.tensor(rows, dtype=torch.float64, device=device).view(*(2,) * 7, 4)
            edges = torch.tensor([-1.0, self.interval - 2.0], dtype=torch.float64, device=device)
            self._constants[device] = table, edges
        return self._constants[device]

    def _outcome(
        self, found: bool, blamed: bool, small: bool, large: bool, lower: bool, settled: bool, waited: bool
    ) -> ScaleChange:
        """What a decision comes to; ``small`` and ``large``: whether there are any such gradients."""
        some = small or large
        if self.period == 1:  # nothing was seen before this update
            lower, some = (found or lower) and not blamed, (found or some) and not blamed
        verdict = -1.0 if found or blamed or lower else float(some)
        if lower:
            return ScaleChange(0.5, 0.0, 0.0, verdict)
        if not some:
            return ScaleChange(1.0, 1.0, 0.0, verdict)
        if settled and not waited:
            return ScaleChange(1.0, 1.0, 1.0, verdict)
        return ScaleChange(2.0, 0.0, 0.0 if settled else -1.0, verdict)
