"""The training losses as a small table: each arm at a few steps of the first seed, smoothed as in the plot."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from fp8compile.extras.demo.results import Results

POINTS = 4  # in addition to the first step
SMOOTHED_SHARE = 25


def curve_table(results: Results) -> Table:
    """A row per arm, a column per step: the first, and after each quarter of the steps that were taken."""
    made = Table(box=None, pad_edge=False, header_style="")
    made.add_column("train loss at")
    runs = [run for arm in results.arms for run in results.compared(arm)[:1]]
    steps = curve_steps(max((len(run.losses) for run in runs), default=0))
    for step in steps:
        made.add_column(f"step {step}" if step == 1 else str(step), justify="right")
    for run in runs:
        smooth = smoothed(run.losses)
        made.add_row(run.arm, *(f"{smooth[step - 1]:.3f}" if step <= len(smooth) else "-" for step in steps))
    return made


def curve_steps(taken: int) -> list[int]:
    """The first step and each quarter of ``taken``, without duplicates."""
    return sorted({max(1, round(taken * k / POINTS)) for k in range(POINTS + 1)}) if taken else []


def smoothed(losses: Sequence[float]) -> list[float]:
    """The running mean over a 25th of the steps."""
    return running_mean(losses, max(1, len(losses) // SMOOTHED_SHARE))


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and up to ``window - 1`` before it."""
    return [sum(part) / len(part) for k in range(len(values)) if (part := values[max(0, k + 1 - window) : k + 1])]
