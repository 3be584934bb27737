"""What an ablation found: tables of our figures beside the published ones, as text and as JSON values."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp8compile import _text

NOT_FOUND = "not found"  # where no figure could be read in a source
Cell = str | float | int | None


@dataclass(frozen=True)
class Table:
    """Rows under their columns; None is printed as "-".

    Attributes:
        title: what the numbers are, with their unit.
        columns: names; the first is of what a row is about.
        rows: a cell for each column.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows), self.title

    def text(self, width: int | None = _text.WIDTH) -> str:
        """The table as it is printed; neither its title nor a cell is wrapped, whatever the width."""
        rows = [tuple(cell_text(cell) for cell in row) for row in self.rows]
        wide = max(width or _text.terminal_width(), _text.columns_of(self.columns, rows))
        return f"{self.title}\n" + _text.printed([_text.table("", self.columns, rows, whole=True)], width=wide)

    def to_dict(self) -> dict[str, Any]:
        """Each row by the names of its columns."""
        rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        return {"title": self.title, "rows": rows}


@dataclass(frozen=True)
class Outcome:
    """All that one paper's ablation found.

    Attributes:
        difference: how this set-up differs from the paper's, in a line.
        sources: where the published figures were read; "" if none was found.
        tables: figures beside the published ones.
        draw: writes the plot to a path.
        findings: what the tables say, a line each.
        figures: all numbers behind the tables, as JSON values.
    """

    difference: str
    sources: str
    tables: tuple[Table, ...]
    draw: Callable[[Path], None]
    findings: tuple[str, ...] = ()
    figures: dict[str, Any] = field(default_factory=dict)

    def text(self, width: int | None = _text.WIDTH) -> str:
        """All tables, and below them the difference and the sources."""
        ends = [*self.findings, f"set-up: {self.difference}", f"published figures: {self.sources or NOT_FOUND}"]
        columns = width or _text.terminal_width()
        return "\n\n".join([*(t.text(width) for t in self.tables), *(_text.wrapped(e, columns) for e in ends)])

    def to_dict(self) -> dict[str, Any]:
        return {
            "findings": list(self.findings),
            "difference": self.difference,
            "published_figures_from": self.sources or None,
            "tables": [table.to_dict() for table in self.tables],
            "figures": self.figures,
        }


def rank_correlation(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Spearman's: 1 where both have the same order, -1 where they have opposite ones; equal values share their mean rank."""
    return statistics.correlation(_ranks(ours), _ranks(theirs))


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(v) + (ordered.count(v) - 1) / 2 for v in values]


def cell_text(cell: Cell) -> str:
    """A number in four significant digits."""
    if cell is None:
        return "-"
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)


def mean(values: Iterable[float | None]) -> float | None:
    """Of the values that are not None; None if there are none."""
    known: Sequence[float] = [v for v in values if v is not None]
    return statistics.fmean(known) if known else None


def with_spread(values: Sequence[float], fmt: str = ".4f") -> str:
    """Mean and standard error as text, "-" for no values."""
    if not values:
        return "-"
    text = f"{statistics.fmean(values):{fmt}}"
    if len(values) < 2:
        return text
    return f"{text} ± {statistics.stdev(values) / len(values) ** 0.5:{fmt.lstrip('+')}}"


def draw_gaps(axes: Any, losses: Mapping[str, Sequence[float]], arms: Sequence[str]) -> None:
    """A line of points for each arm: how far the losses of its seeds are above those of the arm "exact"."""
    for i, arm in enumerate(arms):
        pairs = zip(losses[arm], losses["exact"], strict=True)
        axes.scatter([100 * (a / b - 1) for a, b in pairs], [i] * len(losses[arm]), 20, "#4477aa")
    axes.axvline(0, color="#777777", linewidth=1)
    axes.set_yticks(range(len(arms)), arms)
    axes.invert_yaxis()
    axes.set(xlabel="held-out loss, % above exact")
