"""What is on screen meanwhile: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn

from fp8compile.demo.arms import EAGER
from fp8compile.demo.eta import TimeLeft
from fp8compile.demo.results import Run

SECONDS_BETWEEN_LINES = 10.0


class Screen:
    """Plain lines: the first step of a run, then one every ``every_s`` seconds, then the last step."""

    def __init__(self, console: Console, steps: int, tokens_per_step: int, every_s: float) -> None:
        self.console = console
        self.steps = steps
        self.tokens_per_step = tokens_per_step
        self.every_s = every_s
        self._last_line = float("-inf")

    def __enter__(self) -> Screen:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def begin(self, run: Run) -> None:
        self.say(f"{_title(run)}: compiling" if run.arm != EAGER else f"{_title(run)}: first step")

    def step(self, run: Run, left: TimeLeft | None) -> None:
        done, now = len(run.losses), time.monotonic()
        if done not in (1, self.steps) and now - self._last_line < self.every_s:
            return
        self._last_line = now
        self.say(f"{_title(run)}: step {done}/{self.steps}  {_state(run, self.tokens_per_step, left)}")


class BarScreen(Screen):
    """One bar per run on a terminal."""

    def __init__(self, console: Console, steps: int, tokens_per_step: int) -> None:
        super().__init__(console, steps, tokens_per_step, every_s=0.0)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            console=console,
        )
        self._task = TaskID(0)

    def __enter__(self) -> Screen:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begin(self, run: Run) -> None:
        state = "compiling ..." if run.arm != EAGER else ""
        self._task = self._progress.add_task(_title(run), total=self.steps, state=state)

    def step(self, run: Run, left: TimeLeft | None) -> None:
        state = _state(run, self.tokens_per_step, left)
        self._progress.update(self._task, completed=len(run.losses), state=state)


def screen_for(console: Console, steps: int, tokens_per_step: int) -> Screen:
    """A bar where the console is a terminal, lines where it is a file or a pipe."""
    if console.is_terminal:
        return BarScreen(console, steps, tokens_per_step)
    return Screen(console, steps, tokens_per_step, SECONDS_BETWEEN_LINES)


def _title(run: Run) -> str:
    return f"{run.arm:<10} seed {run.seed}"


def _state(run: Run, tokens_per_step: int, left: TimeLeft | None) -> str:
    median = run.median_step_s
    speed = f"{tokens_per_step / median:,.0f} tokens/s" if median else "-- tokens/s"
    return f"loss {run.losses[-1]:.3f}  {speed}  time left {left if left else '--'}"
