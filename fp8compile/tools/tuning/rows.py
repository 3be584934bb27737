"""What was measured of one recipe, and the summary of its times.

    seconds   median of its turns
    spread    (third quartile - first quartile) / median
    ratio     median over rounds of its turn / plain Inductor's turn in the same round
    doubt     spread of these ratios / sqrt(rounds): what their median is off by, about; inf of one

A machine that slows down slows a round as a whole, so ratios say more than seconds do.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fp8compile.recipe.recipe import Recipe


@dataclass(frozen=True)
class TunedRow:
    """One recipe, measured.

    Attributes:
        name: its name in the table.
        recipe: the recipe; of plain Inductor the preset "off".
        seconds, spread: of a step, forward and backward; NaN where it did not run.
        ratio, doubt: its time beside plain Inductor's in the same rounds; NaN where one of both did not run.
        rounds: how many turns it had.
        first_seconds: its first two steps, which compile, or read what was compiled from a cache on disk.
        peak: bytes, the most allocated during a step beyond what is there before it; None where it was not measured.
        kept: bytes that are kept for the backward.
        db: the worst gradient's SQNR in dB beside the exact step, of those that rounding alone does not decide.
        below: how many gradients are below the bar; None where none were compared.
        note: what went wrong, or was left out.
    """

    name: str
    recipe: Recipe
    seconds: float = math.nan
    spread: float = math.nan
    ratio: float = math.nan
    doubt: float = math.nan
    rounds: int = 0
    first_seconds: float = math.nan
    peak: int | None = None
    kept: int | None = None
    db: float = math.nan
    below: int | None = None
    note: str = ""

    @property
    def ran(self) -> bool:
        """Whether its steps were timed."""
        return not math.isnan(self.seconds)


def summary(seconds: Sequence[float]) -> tuple[float, float]:
    """Median and spread; NaN of nothing."""
    if not seconds:
        return math.nan, math.nan
    first, median, third = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [seconds[0]] * 3
    return median, (third - first) / median


def beside(own: Mapping[int, float], plain: Mapping[int, float]) -> tuple[float, float]:
    """The ratio of two arms by the rounds in which both had a turn, and its doubt."""
    ratios = [own[number] / plain[number] for number in own.keys() & plain.keys()]
    median, spread = summary(ratios)
    if len(ratios) < 2:
        return median, math.inf
    return median, median * spread / math.sqrt(len(ratios))
