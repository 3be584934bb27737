"""The time left for the steps, compilations and evaluations still to come, from times measured so far.

    left = sum over runs of  compile + steps to come * median step + evaluations to come * median evaluation

A run of an arm that was not timed yet counts like the latest arm that was, with the first compile time measured.
The estimate is then called a lower bound, because arms differ. Before the second step nothing is known.
Arms that scale the loss run the same code, so all but the first of them find it compiled.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fp8compile.extras.demo.arms import EAGER, SCALED_ARMS
from fp8compile.extras.demo.results import RUNNING, Run

RECENT_STEPS = 50


@dataclass(frozen=True)
class TimeLeft:
    """Seconds left, or a lower bound while an arm still to come has not been timed."""

    seconds: float
    at_least: bool

    def __str__(self) -> str:
        minutes, seconds = divmod(round(self.seconds), 60)
        hours, minutes = divmod(minutes, 60)
        clock = f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
        return f"at least {clock}" if self.at_least else clock


@dataclass(frozen=True)
class Pace:
    """Seconds of an arm's compilation, step and evaluation."""

    compile_s: float
    step_s: float
    evaluation_s: float


def time_left(plan: Sequence[str], runs: Sequence[Run], steps: int, evaluations: int) -> TimeLeft | None:
    """The time left; None while nothing is known.

    Args:
        plan: the arm of every run, in order.
        runs: the runs of the seeds begun, in the same order; those of the last seed are under way, in turns.
        steps: steps in a run.
        evaluations: evaluations in a run.
    """
    paces = [(run.arm, pace) for run in runs if (pace := _pace(run)) is not None]
    if not paces:
        return None
    measured = dict(paces)
    first_compile_s = next((pace.compile_s for arm, pace in paces if arm != EAGER), 0.0)
    unknown = Pace(first_compile_s, paces[-1][1].step_s, paces[-1][1].evaluation_s)
    total, at_least = 0.0, False
    for index, arm in enumerate(plan):
        run = runs[index] if index < len(runs) else Run(arm, seed=0)
        if run.status != RUNNING:
            continue
        pace = measured.get(arm, unknown)
        if arm not in measured and arm in SCALED_ARMS and set(plan[:index]) & set(SCALED_ARMS):
            pace = replace(pace, compile_s=_found_compiled_s(paces))
        total += _rest(run, pace, steps, evaluations)
        at_least |= arm not in measured
    return TimeLeft(total, at_least)


def _rest(run: Run, pace: Pace, steps: int, evaluations: int) -> float:
    to_compile = 0.0 if run.step_seconds or run.arm == EAGER else pace.compile_s
    to_step = (steps - len(run.losses)) * pace.step_s
    return to_compile + to_step + (evaluations - len(run.evaluations)) * pace.evaluation_s


def _found_compiled_s(paces: Sequence[tuple[str, Pace]]) -> float:
    """Seconds that it takes to load compiled code from the cache: those of the latest arm that did, 0 until there is one."""
    compiles = [pace.compile_s for arm, pace in paces if arm in SCALED_ARMS]
    return compiles[-1] if len(compiles) > 1 else 0.0


def _pace(run: Run) -> Pace | None:
    if run.compile_s is None:
        return None
    evaluation = statistics.median(e.seconds for e in run.evaluations) if run.evaluations else 0.0
    return Pace(run.compile_s, statistics.median(run.step_seconds[1:][-RECENT_STEPS:]), evaluation)
