"""The section of docs/results.md about what fp8compile.extras.watching.watch costs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.measured_sections import load, source, table

FILE = "watching-cpu.json"
NAMES = {"plain": "nothing observed", "observed": "statistics of all values (`fp32.observe=True`)"}


def watching(folder: Path) -> list[str]:
    runs = load(folder, FILE)
    head = (
        "the demo",
        "steps",
        "a step, ms",
        "own time, ms",
        "own time",
        "side by side, median (quartiles)",
        "dashboard",
    )
    rows = [(NAMES[name], *_row(runs[name])) for name in NAMES]
    equal = all(run["losses_are_equal"] for run in runs.values())
    return [
        source(FILE, {**runs["plain"]["environment"]}),
        "The demo is trained twice in turns from the same seed, and one of the two is watched.",
        "*Own time* is what of a watched step is spent in `fp8compile.extras.watching.watch`.",
        "*Side by side* compares the time of neighbouring steps, watched and not.",
        "Its quartiles hold the noise of a machine that others used too.",
        "*Dashboard* is the CPU time of `fp8compile watch --serve`, asked once a second, as a share of the run's time.",
        "Losses of both are equal bit for bit." if equal else "**Losses of both differ.**",
        "",
        *table(head, rows),
    ]


def _row(run: Mapping[str, Any]) -> tuple[str, ...]:
    low, high = run["side_by_side_quartiles"]
    return (
        str(run["steps"]),
        f"{1e3 * run['step_seconds_watched']:.0f}",
        f"{run['own_milliseconds_a_step']:.2f}",
        f"{run['own_time']:.2%}",
        f"{run['side_by_side']:+.1%} ({low:+.1%} to {high:+.1%})",
        f"{run['dashboard']:.2%}",
    )
