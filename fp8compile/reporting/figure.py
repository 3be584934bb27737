"""An empty figure that needs no window; matplotlib is imported when one is made."""

from __future__ import annotations

from typing import Any


def empty_figure(rows: int, columns: int, width: float, height: float, **subplots: Any) -> tuple[Any, Any]:
    """A figure of ``width`` x ``height`` inches without a window, and its axes ``[rows, columns]``.

    ``subplots`` goes to matplotlib's ``Figure.subplots``. Raises ImportError where matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(made)
    grid = made.subplots(rows, columns, squeeze=False, **subplots)
    for axes in grid.flat:
        axes.spines[["top", "right"]].set_visible(False)
    return made, grid
