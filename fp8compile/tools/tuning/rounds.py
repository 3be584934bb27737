"""The whole measurement: plain Inductor first, the exact step, then one recipe after the other, and rounds of all of them.

    plain   compiled, its memory, a few turns
    exact   gradients to compare with
    others  each: gradients, compiled, memory, and a few rounds beside plain Inductor, so that it can be chosen from then on
    rounds  every recipe has a turn, in this order and then in the reverse, until MOST_ROUNDS or until the time is over

It ends where its time is over, and where it is interrupted. What is being compiled is not cut off. No recipe is begun in less
time than the longest compilation took so far.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from fp8compile.compiler import report_store
from fp8compile.tools.checking.check import ITSELF
from fp8compile.tools.tuning.arms import TunedArm
from fp8compile.tools.tuning.gradients import ExactStep
from fp8compile.tools.tuning.measured_arm import (
    MOST_STEPS,
    TURN_SECONDS,
    MeasuredArm,
    TunedStep,
    give_memory_back,
    why_not,
)
from fp8compile.tools.tuning.rows import TunedRow

log = logging.getLogger("fp8compile")

FIRST_ROUNDS, MOST_ROUNDS = 3, 30
NO_TIME = "no time left"
INTERRUPTED = "interrupted: this is what was known by then"
TIME_OVER = "minutes={0:g} are over: with more, all recipes are measured, and for longer"
NOT_COMPARED = "gradients were not compared, since the exact step could not be run ({0}); a smaller batch may fit"


class Rounds:
    """The recipes measured so far, and what else one should know."""

    def __init__(self, arms: Sequence[TunedArm], step: TunedStep, minutes: float, bar: float) -> None:
        self.step, self.bar, self.minutes = step, bar, minutes
        self.measured = [MeasuredArm(arm, step) for arm in arms]
        self.plain, *self.others = self.measured
        self.remarks: list[str] = []
        self.number, self.steps = 0, 0  # of rounds so far; of steps in a turn
        self.exact: ExactStep | None = None
        self._end = time.monotonic() + 60 * minutes

    def run(self) -> None:
        """Measure until all is known, the time is over, or Ctrl-C.

        Raises:
            ValueError: no graph of the model was compiled.
        """
        try:
            self._all()
        except KeyboardInterrupt:
            self.remarks.append(INTERRUPTED)
        finally:
            if self.exact is not None:
                self.exact.close()
            for each in self.measured:
                each.compiled.forget()

    def rows(self) -> tuple[TunedRow, ...]:
        """What is known of each recipe, plain Inductor first."""
        return tuple(each.row(self.plain.turns) for each in self.measured)

    def _all(self) -> None:
        self._begin(self.plain)
        if self.plain.works and not self.plain.compiled.graphs:
            raise ValueError(f"fp8compile.tune: {report_store.NO_GRAPH_COMPILED}")
        if self._left() > 0:
            self._run_the_exact_step()
        for each in self.others:
            if self._left() > max(each.known.get("first_seconds", 0.0) for each in self.measured):
                self._begin(each)
            else:
                each.note = NO_TIME
        most = self.number + MOST_ROUNDS
        while self.number < most and self._left() > 0:
            self._round(self.measured)
        if self._left() <= 0:
            self.remarks.append(TIME_OVER.format(self.minutes))

    def _begin(self, each: MeasuredArm) -> None:
        each.begin(self.exact)
        if each.works and not self.steps:
            self.steps = steps_of_a_turn(each.timed(1))
        both = [self.plain, each] if each is not self.plain else [each]
        for _ in range(FIRST_ROUNDS):
            self._round(both, whatever_is_left=True)  # what was compiled can be chosen
        log.info("tune: measured %s", each.row(self.plain.turns))

    def _run_the_exact_step(self) -> None:
        step = self.step
        try:
            self.exact = ExactStep(step.model, step.args, step.kwargs, step.loss, self.bar)
        except Exception as error:
            self.remarks.append(NOT_COMPARED.format(why_not(error)))
        else:
            if names := self.exact.not_finite:
                self.remarks.append(ITSELF.format(", ".join(names[:5])))
            return
        give_memory_back()

    def _round(self, arms: Sequence[MeasuredArm], whatever_is_left: bool = False) -> None:
        """A turn of each that works, in an order that changes from round to round."""
        for each in arms if self.number % 2 == 0 else reversed(arms):
            if each.works and (whatever_is_left or self._left() > 0):
                each.turn(self.number, self.steps)
        self.number += 1

    def _left(self) -> float:
        return self._end - time.monotonic()


def steps_of_a_turn(seconds: float) -> int:
    """How many steps of so many seconds a turn has."""
    return min(MOST_STEPS, max(1, round(TURN_SECONDS / seconds)))
