"""A picture of a memory budget's frontier: the peak of each state against the time that repeating takes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fp8compile.reporting.figure import empty_figure

MIB = 2**20


def plot_frontier(
    points: Sequence[tuple[int, float]], lowest: Sequence[int], chosen: int, target: int, title: str, path: Path
) -> None:
    """Write the picture.

    Args:
        points: of each state, bytes of the peak and microseconds.
        lowest: the states that some budget chooses, by number; the others are drawn pale.
        chosen: the state that was taken.
        target: the budget in bytes.
        path: with the suffix of the format, ``.png`` for example.
    """
    figure, ((axes,),) = empty_figure(1, 1, 8, 4.8)
    us, peaks = [us for _, us in points], [peak / MIB for peak, _ in points]
    axes.plot(us, peaks, "o", color="#bbbbbb", markersize=4, label="no budget chooses it")
    axes.step(
        [us[at] for at in lowest], [peaks[at] for at in lowest], "o-", where="post", color="#4477aa", label="frontier"
    )
    axes.plot(us[chosen], peaks[chosen], "o", color="#cc4411", markersize=9, label="taken")
    axes.axhline(target / MIB, color="black", linewidth=0.8, linestyle=":", label="budget")
    axes.set(xlabel="repeating, µs, predicted", ylabel="peak, MiB, predicted", title=title, ylim=(0, None))
    axes.legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=120)
