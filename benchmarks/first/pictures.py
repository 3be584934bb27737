"""A picture of a file of facts: each way's speed over plain Inductor's. None where there is no matplotlib."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from benchmarks.first.comparisons import MODELS, PLAIN, WAYS, pairs, timed
from benchmarks.first.facts import Fact


def written(found: Sequence[Fact], path: Path) -> Path | None:
    """The picture's file; None where there is nothing to draw or nothing to draw it with."""
    speeds = {
        f"{MODELS[row.model]}: {WAYS[row.way]}": plain.fastest / row.fastest
        for plain, row in pairs(timed(found))
        if row.way != PLAIN
    }
    if not speeds or importlib.util.find_spec("matplotlib") is None:
        return None
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 1 + 0.3 * len(speeds)))
    axes.barh(
        list(speeds), list(speeds.values()), color=["#2a7" if speed >= 1 else "#c55" for speed in speeds.values()]
    )
    axes.axvline(1.0, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("speed over plain Inductor")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
