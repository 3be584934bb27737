"""What a graph's memory budget asked for, and what each byte less would cost in time: the frontier."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8compile._text import human
from fp8compile.reporting.frontier_plot import plot_frontier

MISSED = "not reached"
SHOWN = 5  # states, in one line


@dataclass(frozen=True)
class Point:
    """One state of a graph: what it keeps, the most it has alive at one time, and what repeating takes.

    Attributes:
        saved: bytes saved for backward.
        peak: the most bytes alive at one time in forward or backward, beside parameters and the caller's data. Gradients
            of parameters count from where they are made. Predicted, at stored bytes.
        us: microseconds that repeating takes on ``Budget.device``: a roofline, nothing measured.
    """

    saved: int
    peak: int
    us: float


@dataclass(frozen=True)
class Budget:
    """A graph under ``Recipe.memory.budget``.

    Attributes:
        asked: the recipe's value.
        target: the bytes that the peak was to stay within.
        frontier: the states looked at, from nothing repeated on.
        chosen: which of them was taken.
        device: what the times are predicted for.
        reason: why the budget had no effect; then ``frontier`` is empty.
        held: for "fit", bytes of parameters, buffers and optimizer states, beside the peak.
    """

    asked: float | str
    target: int = 0
    frontier: tuple[Point, ...] = ()
    chosen: int = 0
    device: str = ""
    reason: str = ""
    held: int = 0

    @property
    def is_met(self) -> bool:
        """Whether the predicted peak is within the target."""
        return bool(self.frontier) and self.frontier[self.chosen].peak <= self.target

    @property
    def lowest(self) -> tuple[int, ...]:
        """The states that some budget chooses, by number: each has a lower peak than all before it."""
        found = list[int]()
        for at, point in enumerate(self.frontier):
            if not found or point.peak < self.frontier[found[-1]].peak:
                found.append(at)
        return tuple(found)

    @property
    def line(self) -> str:
        """The frontier in one line: peaks, and the microseconds that repeating takes for each."""
        at = self.lowest
        shown = sorted({at[round(i * (len(at) - 1) / (SHOWN - 1))] for i in range(SHOWN)}) if at else []
        points = (f"{human(self.frontier[i].peak)} at {self.frontier[i].us:,.0f}" for i in shown)
        return f"its frontier, peak at us of repeating: {', '.join(points)}"

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Write the frontier as a picture, peak in MiB against microseconds; the suffix says the format: ``frontier.png``.

        Raises:
            ValueError: the budget had no effect, so that there is no frontier.
            ImportError: matplotlib is not installed.
            OSError: the file cannot be written.
        """
        if not self.frontier:
            raise ValueError(f"there is no frontier to draw: {self.reason}")
        points = [(point.peak, point.us) for point in self.frontier]
        title = f"memory budget {self._name}, times on {self.device}"
        plot_frontier(points, self.lowest, self.chosen, self.target, title, Path(path))

    def moved(self, place: str) -> Budget:
        """Itself: it is about a graph, wherever that stands."""
        return self

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Budget:
        """The inverse of ``dataclasses.asdict``, also after a trip through JSON."""
        return cls(**{**data, "frontier": tuple(Point(**point) for point in data["frontier"])})

    def __str__(self) -> str:
        if not self.frontier:
            return f"memory budget {self._name}: {self.reason}"
        before, now = self.frontier[0], self.frontier[self.chosen]
        if self.held:
            return f"{self._fit}; repeating takes {now.us:,.0f} us on {self.device}, predicted"
        return (
            f"memory budget {self._name}: predicted peak {human(now.peak)} of {human(before.peak)}"
            f"{'' if self.is_met else ', ' + MISSED}; repeating takes {now.us:,.0f} us on {self.device}, predicted"
        )

    @property
    def _name(self) -> str:
        return self.asked if isinstance(self.asked, str) else f"{self.asked:g}"

    @property
    def _fit(self) -> str:
        peak, card = self.held + self.frontier[self.chosen].peak, self.held + self.target
        text = f"memory budget fit: predicted peak of the step {human(peak)} of {human(card)}, {human(self.held)} of it held"
        return text if self.is_met else f"{text}: does not fit at any budget, {human(peak - card)} too much"

    @property
    def table(self) -> str:
        """The frontier: peak and saved bytes against microseconds, the chosen state marked."""
        rows = [f"{'peak':>12} {'saved':>12} {'repeating, us':>14}"]
        for at, point in enumerate(self.frontier):
            mark = " <-" if at == self.chosen else ""
            rows.append(f"{human(point.peak):>12} {human(point.saved):>12} {point.us:>14,.0f}{mark}")
        return "\n".join(rows)
