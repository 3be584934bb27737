"""A run of a plan: arms compile side by side, then each is timed alone, most wanted first, until its seconds are over.

In waves: while some compile, until all are through, or until a share of what is left is gone, or until those that are ready
fill the rest. Then whoever still compiles stands still, and the ready ones are timed in the plan's order. An arm costs itself
alone, whether it fails, hangs, dies or finds no memory, and what it did is a fact. One that the end of the run cuts off has
no last fact: the next run takes it up.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.first import facts, nsight
from benchmarks.first.plan import Arm
from benchmarks.first.process import Process
from benchmarks.first.speaking import Told

TICK = 0.05
RUN = "run"  # the job of facts about the run itself


@dataclass(frozen=True)
class Limits:
    """Of a run.

    Attributes:
        seconds: all of it.
        share: of what is left, that a wave may compile for.
        slots: arms that compile at once.
        gib: that arms may take on the device together.
        compiling: seconds that an arm may take until it is ready, or in all where it does not wait.
        timed: seconds that it may take from then on.
    """

    seconds: float
    share: float = 0.55
    slots: int = 15
    gib: float = 72.0
    compiling: float = 240.0
    timed: float = 80.0


class Run:
    """Of one plan into one file."""

    def __init__(
        self, arms: Sequence[Arm], limits: Limits, path: Path, device: str, tiny: bool, head: dict[str, Any]
    ):
        self.limits, self.path, self.began = limits, path, time.time()
        self.end = self.began + limits.seconds
        facts.mended(path)
        settled = facts.outcomes(facts.read(path))
        self.waiting = [arm for arm in arms if arm.name not in settled]
        self.order = {arm.name: place for place, arm in enumerate(arms)}
        self.processes: list[Process] = []
        self._folder = tempfile.TemporaryDirectory(prefix="first-")
        self.told = Told(RUN, str(path), self._folder.name, device, tiny, self.began, head)
        self.told.say("begun", arms=[arm.name for arm in self.waiting], settled=len(arms) - len(self.waiting))

    def through(self) -> None:
        """Run until nothing is left or time is over; leave no process behind."""
        try:
            self._alone()
            while (self.waiting or self.processes) and self._left() > 0:
                self._compile()
                self._time_the_ready()
        finally:
            cut = [process.arm.name for process in self.processes if not process.done]
            for process in self.processes:
                process.kill()
            not_reached = [*cut, *(arm.name for arm in self.waiting)]
            self.told.say("over", seconds=round(time.time() - self.began, 1), not_reached=not_reached)
            self._folder.cleanup()

    def _left(self) -> float:
        return self.end - time.time()

    def _alone(self) -> None:
        """What measures the card itself shares it with nobody."""
        for arm in [arm for arm in self.waiting if arm.words[0] == "card"]:
            self._start(arm)
            self._watched(self.processes[0], min(self.limits.timed, self._left()))

    def _start(self, arm: Arm) -> None:
        self.waiting.remove(arm)
        self.processes.append(Process(arm, self.told, Path(self._folder.name)))

    def _compile(self) -> None:
        until = time.time() + self.limits.share * self._left()
        for process in self.processes:
            process.go_on()
        before = time.time()
        while time.time() < until and self._time_of_the_ready() < self._left():
            self._start_some()
            time.sleep(TICK)
            now = time.time()
            for process in [each for each in self.processes if each.busy]:
                process.ran += now - before
                if process.ran > self.limits.compiling:
                    self._late(process, "compiling", self.limits.compiling)
            before = now
            self._settle_the_done()
            if not any(process.busy for process in self.processes) and not self._fitting():
                break
        for process in [each for each in self.processes if each.busy]:
            process.stop()

    def _start_some(self) -> None:
        while sum(process.busy for process in self.processes) < self.limits.slots and (fitting := self._fitting()):
            self._start(fitting[0])

    def _fitting(self) -> list[Arm]:
        """Waiting arms that there is memory for; one that wants more than the card has is tried alone."""
        taken = sum(process.gib for process in self.processes)
        room = self.limits.gib - taken
        return [arm for arm in self.waiting if arm.kind.compiling_gib <= room or not taken]

    def _time_of_the_ready(self) -> float:
        return sum(process.arm.kind.seconds for process in self.processes if process.ready)

    def _time_the_ready(self) -> None:
        ready = sorted((p for p in self.processes if p.ready), key=lambda process: self.order[process.arm.name])
        for process in ready:
            if self._left() <= 0:
                return
            process.let_go()
            self._watched(process, min(self.limits.timed, self._left()))

    def _watched(self, process: Process, seconds: float) -> None:
        """Wait for an arm; it is settled unless the run's end cuts it off."""
        until = time.time() + seconds
        while not process.done and time.time() < until:
            time.sleep(TICK / 5)
        if not process.done and self._left() > 0:
            self._late(process, "timed", self.limits.timed)
        self._settle_the_done()

    def _late(self, process: Process, when: str, limit: float) -> None:
        process.kill()
        told = process.told
        told.say(facts.END, outcome=facts.LATE, when=when, limit_s=limit)

    def _settle_the_done(self) -> None:
        ended = [process for process in self.processes if process.done]
        known = facts.outcomes(facts.read(self.path)) if ended else {}
        for process in ended:
            process.kill()  # what it started may still be there
            self.processes.remove(process)
            self._read_counters(process)
            if process.arm.name not in known:
                process.told.say(facts.END, outcome=facts.DIED, says=process.last_words())

    def _read_counters(self, process: Process) -> None:
        log = process.log.with_suffix(".csv")
        if log.exists() and (rows := nsight.rows(log.read_text(errors="replace"))):
            process.told.say("counters", launches=rows)
