"""What the suite and the studies write: JSON, whole or not at all, and figures that need no window."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_json(path: Path, found: Any) -> None:
    """Write whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(found, indent=1) + "\n")
    partial.replace(path)


def figure(rows: int, columns: int, width: float, height: float) -> tuple[Any, Any]:
    """An empty figure without a window, and its axes ``[rows, columns]``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(made)
    grid = made.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.spines[["top", "right"]].set_visible(False)
    return made, grid
