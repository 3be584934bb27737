"""What is on screen during training: on a terminal a bar for each arm, elsewhere a line now and then. Fits 60 columns."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from fp8compile.extras.demo.arms import EAGER
from fp8compile.extras.demo.eta import TimeLeft
from fp8compile.extras.demo.results import DONE, RUNNING, Run

SECONDS_BETWEEN_LINES = 10.0


class Screen:
    """Plain lines: each run's first step, then, every ``every_s`` seconds, all arms at the last step they share."""

    def __init__(self, console: Console, steps: int, every_s: float) -> None:
        self.console = console
        self.steps = steps
        self.every_s = every_s
        self._last_line = time.monotonic()

    def __enter__(self) -> Screen:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def say(self, what: RenderableType) -> None:
        """Print a line, or several, wrapped between words at the width of the console."""
        self.console.print(what, highlight=False, markup=False)

    def begin(self, run: Run) -> None:
        """A run's first turn begins: nothing of it is compiled yet."""
        self.say(f"{_title(run)}: {_beginning(run)}")

    def step(self, runs: Sequence[Run], run: Run, left: TimeLeft | None) -> None:
        """``run`` has taken a step; ``runs`` are those of its seed, begun or not."""
        done, now = len(run.losses), time.monotonic()
        if done == 1:
            self.say(f"{_title(run)}: first step after {run.step_seconds[0]:.1f} s, loss {run.losses[0]:.3f}")
            return
        sound = [each for each in runs if each.status in (RUNNING, DONE)]
        common = min(len(each.losses) for each in sound)
        if common < 2 or (common < self.steps and now - self._last_line < self.every_s):
            return
        self._last_line = now
        losses = ", ".join(f"{each.arm} {each.losses[common - 1]:.3f}" for each in sound)
        self.say(f"seed {run.seed}, step {common} of {self.steps}: loss {losses}; time left {left if left else '--'}")


class BarScreen(Screen):
    """A bar for each arm of the current seed, and below them the time left for all seeds."""

    def __init__(self, console: Console, steps: int) -> None:
        super().__init__(console, steps, every_s=0.0)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            console=console,
            expand=True,
        )
        self._seed = -1
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Screen:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begin(self, run: Run) -> None:
        if run.seed != self._seed:
            for task in self._progress.task_ids:
                self._progress.remove_task(task)
            self._seed, self._tasks = run.seed, {}
        self._tasks[run.arm] = self._progress.add_task(run.arm, total=self.steps, state=_beginning(run))

    def step(self, runs: Sequence[Run], run: Run, left: TimeLeft | None) -> None:
        median = run.median_step_s
        speed = f"{median * 1e3:5.0f} ms" if median else "   -- ms"
        state = f"loss {run.losses[-1]:.3f} {speed}"
        self._progress.update(self._tasks[run.arm], completed=len(run.losses), state=state)
        self._show_all(runs, run.seed, left)

    def _show_all(self, runs: Sequence[Run], seed: int, left: TimeLeft | None) -> None:
        """Update the last row, which is added once every arm has a row."""
        total = self.steps * len(runs)
        if len(self._tasks) == len(runs):
            self._tasks["all"] = self._progress.add_task(f"seed {seed}", total=total, state="")
        if "all" in self._tasks:
            done = sum(len(each.losses) for each in runs)
            self._progress.update(self._tasks["all"], completed=done, state=f"left {left if left else '--'}")


def screen_for(console: Console, steps: int) -> Screen:
    """Bars where the console is a terminal, lines where it is a file or a pipe."""
    return BarScreen(console, steps) if console.is_terminal else Screen(console, steps, SECONDS_BETWEEN_LINES)


def _title(run: Run) -> str:
    return f"{run.arm}, seed {run.seed}"


def _beginning(run: Run) -> str:
    return "compiling" if run.arm != EAGER else "first step"
