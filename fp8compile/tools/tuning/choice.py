"""Which of the measured recipes is best.

    may be chosen   steps were timed, and no gradient is below the bar: its error is ``bar`` dB or more below plain's, or
                    where rounding decides a gradient, below those of the step together (numerics/gradient_quality.py)
    "speed"         of those at most 2 % slower than plain Inductor: the fastest
    "memory"        of those at most ``slower`` slower than plain Inductor: the one with the least peak
    alike           what is within 2 % of the best, or within the doubt of the two times: the first in the table

Recipes stand in the table from the simplest on, plain Inductor first. Where that did not run, times are compared with the
fastest recipe's. Where the exact step did not run either, nothing is known of gradients, and recipes are chosen without.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from fp8compile.tools.tuning.rows import TunedRow

SPEED, MEMORY = "speed", "memory"
GOALS = (SPEED, MEMORY)
ALIKE = 0.02


def best_of(rows: Sequence[TunedRow], goal: str, slower: float) -> TunedRow | None:
    """The best row, of rows from the simplest on with plain Inductor first; None where no recipe may be chosen.

    Args:
        rows: what was measured.
        goal: "speed" or "memory".
        slower: with "memory", how much slower than plain Inductor a step may be: 0.25 is a quarter.
    """
    ran = [row for row in rows if row.ran]
    usable = [row for row in ran if row.below == 0] or [row for row in ran if row.below is None]
    if not usable:
        return None
    time_of = _times(rows, usable)
    most = 1 + (ALIKE if goal == SPEED else slower)
    allowed = [row for row in usable if time_of(row) <= most]
    return _fastest(allowed, time_of) if goal == SPEED else _smallest(allowed, time_of)


def _times(rows: Sequence[TunedRow], usable: Sequence[TunedRow]) -> Callable[[TunedRow], float]:
    """Times as a multiple of plain Inductor's, or else of the fastest's."""
    if rows[0].ran:
        return lambda row: row.ratio
    least = min(row.seconds for row in usable)
    return lambda row: row.seconds / least


def _fastest(rows: Sequence[TunedRow], time_of: Callable[[TunedRow], float]) -> TunedRow | None:
    best = min(rows, key=time_of, default=None)
    if best is None:
        return None

    def is_alike(row: TunedRow) -> bool:
        doubt = max((each for each in (row.doubt, best.doubt) if not math.isnan(each)), default=0.0)
        return time_of(row) - time_of(best) <= max(ALIKE * time_of(best), doubt)

    return next(row for row in rows if is_alike(row))


def _smallest(rows: Sequence[TunedRow], time_of: Callable[[TunedRow], float]) -> TunedRow | None:
    """The one with the least peak; the fastest where no peak was measured."""
    known = [(row, row.peak) for row in rows if row.peak is not None]
    if not known:
        return _fastest(rows, time_of)
    least = min(peak for _, peak in known)
    return next(row for row, peak in known if peak <= least * (1 + ALIKE))
