"""Arms in turns: one takes a short block of steps, then the next takes the same block.

    blocks   1, 5, 5, ... steps; the first step compiles
    order    A B, B A, A B, ...: a machine that slows down, slows all arms

Whenever the training stops, arms are at most a block apart; ``cut_to_common_step`` drops the steps that not all arms have.
In a block of five, four steps follow a step of the same arm, and a step's time is the median. So it does not include the
effect of what another arm left in the caches.

All arms of a seed exist side by side: each has its own weights, optimizer states and place in the batches. Dynamo tells
compiled code apart by backend, options and dtype. Arms that are alike in all three, the FP16 ones, run the same code, each
on its own weights. Between seeds all compiled code is dropped.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from fp8compile._messages import cause
from fp8compile.extras.demo import compiling
from fp8compile.extras.demo.loop import Task, Training
from fp8compile.extras.demo.loss_scales import DIVERGED, DivergenceError
from fp8compile.extras.demo.memory import ArmMemory
from fp8compile.extras.demo.model import build_model
from fp8compile.extras.demo.results import DONE, RUNNING, Run

BLOCK = 5


class ProgressWatcher(Protocol):
    """Receives the progress of the runs."""

    def begins(self, run: Run) -> None: ...
    def stepped(self, run: Run) -> None: ...
    def stopped(self, run: Run) -> None:
        """``run`` failed or diverged; the other arms go on."""


class ArmTurns:
    """One arm from one seed; its first turn builds its model."""

    def __init__(self, run: Run, task: Task, backend_options: Mapping[str, Any]) -> None:
        self.run, self.task, self.backend_options = run, task, backend_options
        self.memory = ArmMemory(task.device)
        self.training: Training | None = None

    def take(self, steps: int, watcher: ProgressWatcher) -> None:
        """Take ``steps`` steps. A run that fails or diverges says so in its status and drops its model."""
        try:
            training = self.training = self.training or self._begin(watcher)
            for _ in range(steps):
                self._step(training)
                watcher.stepped(self.run)
        except DivergenceError as why:
            self._stop(f"{DIVERGED} at step {len(self.run.scales)}: {why}", watcher)
        except Exception as error:
            self.run.traceback = traceback.format_exc()
            self._stop(f"failed: {cause(error)}", watcher)

    def _begin(self, watcher: ProgressWatcher) -> Training:
        run, task = self.run, self.task
        watcher.begins(run)
        with self.memory.counted():
            model = build_model(task.size, run.seed, task.device).to(compiling.dtype_of(run.arm))
            return Training(run, model, compiling.compile_arm(run.arm, model, self.backend_options), task)

    def _step(self, training: Training) -> None:
        first, hits = not self.run.losses, compiling.compiler_cache_hits()
        with self.memory.counted(a_step=not first):
            training.step()
        self.run.peak_bytes = self.memory.peak
        if first:
            self.run.warm_cache = compiling.compiler_cache_hits() > hits

    def _stop(self, status: str, watcher: ProgressWatcher) -> None:
        self.run.status, self.training = status, None
        watcher.stopped(self.run)


def train_in_turns(
    runs: Sequence[Run], task: Task, backend_options: Mapping[str, Any], watcher: ProgressWatcher
) -> None:
    """Train runs of one seed side by side, to the end or until each has stopped by itself."""
    compiling.forget_compiled()
    turns = [ArmTurns(run, task, backend_options) for run in runs]
    for number, steps in enumerate(blocks(task.steps)):
        for turn in turns if number % 2 == 0 else reversed(turns):
            if turn.run.status == RUNNING:
                turn.take(steps, watcher)
    for run in runs:
        if run.status == RUNNING:
            run.status = DONE


def blocks(steps: int) -> Iterator[int]:
    """Lengths of the blocks, ``steps`` in all: the first step by itself, then ``BLOCK`` at a time."""
    done = min(1, steps)
    yield done
    while done < steps:
        yield min(BLOCK, steps - done)
        done += min(BLOCK, steps - done)


def cut_to_common_step(runs: Sequence[Run]) -> None:
    """Drop the steps and evaluations that one of ``runs`` lacks, so that all stand at the same step."""
    if not runs:
        return
    steps = min(len(run.losses) for run in runs)
    evaluated = set.intersection(*({e.step for e in run.evaluations} for run in runs))
    for run in runs:
        run.cut(steps, evaluated)
