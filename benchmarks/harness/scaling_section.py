"""The section of docs/results.md about modes of scaling: FP8 linears in each of them, in dB against float64."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.measured_sections import load, source, table

NAME = "scaling-modes-cpu.json"


def scaling_modes(folder: Path) -> list[str]:
    """One table for each kind of model, as trained and with large channels: a row for each mode."""
    found = load(folder, NAME)
    models: Mapping[str, Any] = found["models"]
    kinds = [kind for kind in next(iter(models.values())) if kind != "about"]
    lines = [
        source(NAME, found),
        "FP8 linears alone, emulated, in FP32 models: worst gradient (median) / output, SQNR in dB against float64.",
        "",
        *(f"- {name}: {row['about']}." for name, row in models.items()),
    ]
    for kind in kinds:
        modes = next(iter(models.values()))[kind]
        rows = [(mode, *(_cell(row[kind][mode]) for row in models.values() if kind in row)) for mode in modes]
        lines += ["", *table((kind, *(name for name, row in models.items() if kind in row)), rows)]
    return lines


def _cell(row: Mapping[str, Any]) -> str:
    return f"{row['worst_db']:.1f} ({row['median_db']:.1f}) / {row['output_db']:.1f}"
