"""The section of docs/results.md about memory budgets: peaks of ours beside those of PyTorch's, at each budget."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.harness.measured_sections import load, source, table

NAME = "budget-cpu.json"
MISSING = "-"


def budgets(folder: Path) -> list[str]:
    found = load(folder, NAME)
    models = found["models"]
    asked = sorted({b for model in models.values() for b in model["ours"]}, key=float, reverse=True)
    rows = [(budget, *(_cell(model, budget) for model in models.values())) for budget in asked]
    return [
        source(NAME, found),
        "The most bytes allocated at one time in forward and backward, MB: ours / PyTorch's `activation_memory_budget`.",
        "Gradients of parameters are in it. Nothing is stored as codes.",
        "A fraction is of the peak in ours, of what is saved in PyTorch's. At 1.0 both are plain Inductor.",
        "",
        *(f"- {name}: {model['about']}. {_verdict(model)}" for name, model in models.items()),
        "",
        *table(("budget", *models), rows),
    ]


def _cell(model: Mapping[str, Any], budget: str) -> str:
    cell, theirs = model["ours"].get(budget), model.get("pytorch", {}).get(budget)
    return f"{_mb(cell and cell['peak'])} / {_mb(theirs)}"


def _mb(peak: int | None) -> str:
    return MISSING if peak is None else f"{peak / 1e6:.1f}"


def _verdict(model: Mapping[str, Any]) -> str:
    """How often a smaller budget has a higher peak, in each; and at how many budgets ours is above PyTorch's."""
    ours = {budget: cell["peak"] for budget, cell in model["ours"].items()}
    theirs = model.get("pytorch", {})
    above = sum(ours[budget] > theirs[budget] for budget in ours.keys() & theirs.keys())
    return (
        f"Ours rises {_rises(ours)} times, PyTorch's {_rises(theirs)} times; ours is above PyTorch's at {above} "
        f"of {len(ours.keys() & theirs.keys())} budgets."
    )


def _rises(peaks: Mapping[str, int]) -> int:
    falling = [peaks[budget] for budget in sorted(peaks, key=float, reverse=True)]
    return sum(after > before for before, after in pairwise(falling))
