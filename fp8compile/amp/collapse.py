"""Whether a loss scale collapses or surges, by its own history.

    collapse   after the warm-up: the scale is ``fall`` times below its highest of the last ``window`` updates,
               or ``halvings`` bad updates came in a row (each asked for a smaller scale, or skipped its step)
    surge      after the warm-up: the scale is ``surge`` times above its highest of the ``window`` updates before the last 20

A scale that keeps falling means that gradients are inf or NaN at any scale: to train on would be to train on garbage. A surge
is how divergence announced itself in OPT-175B's log book: gradients vanish, the scale jumps up, then the loss does.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from fp8compile._arguments import check_count, is_number
from fp8compile.observe.records import Observations

LATELY = 20  # updates in which a surge happens
NOTHING_OBSERVED = (
    "No layer was observed: compile the model with fp8compile, or call fp8compile.amp.watch(model), to have statistics "
    "layer by layer."
)
_log = logging.getLogger("fp8compile")


class LossScaleCollapse(RuntimeError):
    """The loss scale kept falling: gradients are inf or NaN, or unreasonably large, at any scale.

    It is raised before the step that it stops has changed anything. To train on, call ``scaler.acknowledge()``.

    Attributes:
        why: the reason, in one line.
        step: the update at which it was noticed.
        scale: the loss scale after it.
        observations: what was seen of the model, step by step.
        report: the layers that overflowed, as text.
    """

    def __init__(self, why: str, step: int, scale: float, observations: Sequence[Observations], report: str) -> None:
        super().__init__(f"update {step}: {why}; the loss scale is {scale:g}.\n{report}")
        self.why, self.step, self.scale = why, step, scale
        self.observations, self.report = tuple(observations), report

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickle leaves out the observations, which belong to tensors of this process."""
        return LossScaleCollapse, (self.why, self.step, self.scale, (), self.report)


@dataclass(frozen=True)
class Limits:
    """When a scale's course is a collapse or a surge; numbers of updates and factors, see the head of this file."""

    warmup: int = 100
    fall: float = 2.0**10
    halvings: int = 8
    surge: float = 32.0
    window: int = 1000

    def __post_init__(self) -> None:
        check_count("warmup", self.warmup)
        for name in ("halvings", "window"):
            check_count(name, getattr(self, name), low=1)
        for name in ("fall", "surge"):
            value = getattr(self, name)
            if not (is_number(value) and value > 1):
                raise ValueError(f"{name}={value!r}: a factor above 1 is needed; math.inf for never")


class Watchdog:
    """Looks at each new scale on the host. ``state`` is what it has to remember beside the scales themselves."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.bad_in_a_row = 0
        self.warned = 0  # the update of the last warning of a surge, 0: none yet
        self.acknowledged = 0  # updates up to this one do not count

    def look(self, history: deque[tuple[int, float]], verdict: float) -> str | None:
        """Why this is a collapse, or None; the newest ``(update, scale)`` comes last. Logs a warning of a surge."""
        step, scale = history[-1]
        if step <= max(self.limits.warmup, self.acknowledged):
            return None
        if verdict:
            self.bad_in_a_row = self.bad_in_a_row + 1 if verdict < 0 else 0
        recent = itertools.islice(reversed(history), self.limits.window)
        known = [each for each in recent if each[0] > max(self.limits.warmup, self.acknowledged)]
        self._surge(step, scale, known)
        peak = max(each for _, each in known)
        if peak >= self.limits.fall * scale:
            return f"the loss scale fell from {peak:g}, {peak / scale:g}-fold, within {self.limits.window} updates"
        if self.bad_in_a_row >= self.limits.halvings:
            return f"{self.bad_in_a_row} bad updates in a row, each with gradients too large, inf or NaN"
        return None

    def _surge(self, step: int, scale: float, known: list[tuple[int, float]]) -> None:
        before = [each for then, each in known if then <= step - LATELY]
        lately = self.warned and step - self.warned < self.limits.window
        if before and scale >= self.limits.surge * max(before) and not lately:
            self.warned = step
            _log.warning(
                "update %d: the loss scale surged to %g, %g times its highest before: gradients vanish, which often comes "
                "before a loss that diverges. Set LossScaler(ceiling=...), or lower the learning rate.",
                step, scale, scale / max(before),
            )  # fmt: skip

    def acknowledge(self, update: int) -> None:
        """Start afresh: what the scale did up to this update no longer counts as a sign of a collapse or a surge."""
        self.bad_in_a_row, self.acknowledged = 0, update

    def state(self) -> dict[str, Any]:
        own = {"bad_in_a_row": self.bad_in_a_row, "warned": self.warned, "acknowledged": self.acknowledged}
        return {**own, **asdict(self.limits)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.bad_in_a_row, self.warned = state["bad_in_a_row"], state["warned"]
        self.acknowledged = state.get("acknowledged", 0)  # states saved before there was acknowledge() lack it
        self.limits = Limits(**{each.name: state[each.name] for each in fields(Limits)})
