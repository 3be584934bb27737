"""What ``tune`` found, as a table: a row a recipe, then the best one and the options that give it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fp8compile._text import human, printed, table, wrapped
from fp8compile.recipe.recipe import Recipe
from fp8compile.tools.checking.exact_modules import options_text
from fp8compile.tools.checking.text import decibels
from fp8compile.tools.tuning.arms import OFF, PLAIN
from fp8compile.tools.tuning.choice import MEMORY, best_of
from fp8compile.tools.tuning.rows import TunedRow

NONE, PROSE = "-", 100  # columns
COLUMNS = ("recipe", "ms", "spread", "time", "peak", "kept", "worst gradient", "first s")
BEST_IS_PLAIN = 'best: plain Inductor. The recipe is the preset "off", which leaves everything as Inductor has it'
NOTHING_RAN = 'nothing can be chosen: no recipe was measured. The recipe is the preset "off"'
PREFACE = (
    "fp8compile.tune on {0}: a step is one forward and backward. Peak is what it allocates, kept what it saves for the "
    "backward; time is that of plain Inductor in the same rounds."
)


@dataclass(frozen=True)
class Tuned:
    """What ``tune`` measured: ``str()`` is a table.

    Attributes:
        rows: plain Inductor, then every recipe, from the simplest on.
        goal, slower, bar: what was asked for.
        device: where it was measured: "cpu", or the name of a GPU.
        remarks: what else one should know.
    """

    rows: tuple[TunedRow, ...]
    goal: str
    slower: float
    bar: float
    device: str
    remarks: tuple[str, ...] = ()

    @property
    def best(self) -> TunedRow | None:
        """The row that is chosen; None where no recipe could be measured."""
        return best_of(self.rows, self.goal, self.slower)

    @property
    def recipe(self) -> Recipe:
        """The best recipe; where plain Inductor is best, or nothing is known, the preset "off"."""
        return self.best.recipe if self.best is not None else OFF

    def __str__(self) -> str:
        cells = [_cells(row, self.rows[0], self.bar) for row in self.rows]
        first = wrapped(PREFACE.format(self.device), PROSE)
        lines = (*self._notes, *(f"remark: {remark}" for remark in self.remarks))
        below = (*(wrapped(line, PROSE) for line in lines), wrapped(self._rule, PROSE), self._verdict, self._line)
        return printed([first, table("", COLUMNS, cells, whole=True), *below])

    @property
    def _notes(self) -> list[str]:
        """A line for each thing that went wrong, with the recipes that it went wrong in."""
        notes = dict.fromkeys(row.note for row in self.rows if row.note)
        return [f"{', '.join(row.name for row in self.rows if row.note == note)}: {note}" for note in notes]

    @property
    def _rule(self) -> str:
        slowest = f", of those at most {self.slower:.0%} slower than plain Inductor" if self.goal == MEMORY else ""
        what = "the least peak" if self.goal == MEMORY else "the fastest"
        return (
            f"Goal {self.goal}: {what} with no gradient below {self.bar:g} dB{slowest}; what is alike, the simplest."
        )

    @property
    def _verdict(self) -> str:
        if self.best is None:
            return NOTHING_RAN
        return BEST_IS_PLAIN if self.best.name == PLAIN else f"best: {self.best.name}"

    @property
    def _line(self) -> str:
        return 'options={"preset": "off"}' if self.recipe == OFF else options_text(self.recipe)


def _cells(row: TunedRow, plain: TunedRow, bar: float) -> tuple[str, ...]:
    ran = row.ran
    doubt = f" ±{row.doubt:.2f}" if math.isfinite(row.doubt) else ""
    ratio = f"{row.ratio:.2f}{doubt}" if not math.isnan(row.ratio) and row is not plain else NONE
    return (
        row.name,
        f"{1e3 * row.seconds:.1f}" if ran else NONE,
        f"{row.spread:.0%}" if ran else NONE,
        ratio,
        _bytes(row.peak, plain.peak),
        _bytes(row.kept, plain.kept),
        _gradients(row, bar),
        f"{row.first_seconds:.1f}" if not math.isnan(row.first_seconds) else NONE,
    )


def _bytes(own: int | None, plain: int | None) -> str:
    if own is None:
        return NONE
    return f"{human(own)} ({own / plain:.0%})" if plain else human(own)


def _gradients(row: TunedRow, bar: float) -> str:
    if row.below is None or row.name == PLAIN:
        return NONE
    return decibels(row.db) + (f", {row.below} below {bar:g} dB" if row.below else "")
