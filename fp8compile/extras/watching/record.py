"""One step under way: what is known of it on the host, and what is on its way there."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fp8compile.extras.watching import operands, states, statistics
from fp8compile.extras.watching.late import Late


@dataclass
class Logged:
    """What ``Watcher.log`` was given of a step: losses, tokens, other numbers."""

    losses: list[Late] = field(default_factory=list)
    tokens: int = 0
    others: dict[str, Late] = field(default_factory=dict)


@dataclass
class StepRecord:
    """A step that has ended.

    Attributes:
        known: what the host knew when it ended.
        update: the number that the loss scaler gave it; None where no scaler ended it.
        outcome: what the loss scaler found, which reaches the host later.
    """

    number: int
    seconds: float | None
    known: dict[str, Any]
    logged: Logged
    observed: list[statistics.PendingStatistics] = field(default_factory=list)
    operands: list[operands.PendingOperands] = field(default_factory=list)
    sample: states.Sample | None = None
    update: int | None = None
    outcome: dict[str, float] | None = None
    time: float = field(default_factory=time.time)

    @property
    def arrived(self) -> bool:
        """Whether all of it is on the host."""
        lates = [*self.logged.losses, *self.logged.others.values(), *(part.stats for part in self.observed)]
        lates += [part.seen for part in self.operands] + ([self.sample.norms] if self.sample else [])
        return all(late.arrived for late in lates)

    def record(self, seen: statistics.Statistics) -> dict[str, Any]:
        """The step's line as values; waits for what is under way."""
        found: dict[str, Any] = {"step": self.number, "time": self.time}
        if self.seconds is not None:
            found["seconds"] = self.seconds
        found |= self._logged() | self._scaled() | seen.read(self.number, self.observed)
        found |= (
            operands.OperandCollector.read(self.operands) | (self.sample.read() if self.sample else {}) | self.known
        )
        if "overflow" not in found and (found.get("skipped") or _is_not_finite(found.get("loss"))):
            line = f"step {self.number}: {_what(found)}; layer not known: {seen.why_unknown}"
            found["overflow"] = {"line": line, "count": 0, "layers": []}
        return found

    def _logged(self) -> dict[str, Any]:
        logged, found = self.logged, dict[str, Any]()
        if logged.losses:
            losses = [float(late.value()) for late in logged.losses]
            found["loss"] = sum(losses) / len(losses)
        if logged.tokens:
            found["tokens"] = logged.tokens
            if self.seconds:
                found["tokens_per_s"] = logged.tokens / self.seconds
        return found | {name: float(late.value()) for name, late in logged.others.items()}

    def _scaled(self) -> dict[str, Any]:
        if self.outcome is None:
            return {}
        return {"scale": self.outcome["scale"], "skipped": self.outcome["found"] > 0}


def late_number(value: Any) -> Late:
    """A number, or a tensor of one element, that is read later.

    Raises:
        ValueError: neither.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"log() takes numbers and tensors of one element, not one of shape {[*value.shape]}")
        return Late(value.detach().reshape(()))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"log() takes numbers and tensors of one element, not {value!r:.80}")
    return Late(torch.tensor(float(value), dtype=torch.float64))


def _is_not_finite(loss: float | None) -> bool:
    return loss is not None and not abs(loss) < float("inf")


def _what(found: dict[str, Any]) -> str:
    if _is_not_finite(found.get("loss")):
        return f"the loss was {found['loss']}"
    return "inf or NaN in the gradients, so the step was skipped"
