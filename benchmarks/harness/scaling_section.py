"""The sections of docs/results.md about modes of scaling: gradients of FP8 linears in dB, and training with them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.measured_sections import load, source, table

NAME, TRAINING, SMOOTH = "scaling-modes-cpu.json", "mode-training-cpu.json", "smooth-swiglu-cpu.json"


def scaling_modes(folder: Path) -> list[str]:
    """One table for each kind of model, as trained and with large channels: a row for each mode."""
    found = load(folder, NAME)
    models: Mapping[str, Any] = found["models"]
    kinds = [kind for kind in next(iter(models.values())) if kind != "about"]
    lines = [
        source(NAME, found),
        "FP8 and INT8 linears alone, emulated, in FP32 models: worst gradient (median) / output, SQNR in dB against float64.",
        "",
        *(f"- {name}: {row['about']}." for name, row in models.items()),
    ]
    for kind in kinds:
        modes = next(iter(models.values()))[kind]
        rows = [(mode, *(_cell(row[kind][mode]) for row in models.values() if kind in row)) for mode in modes]
        lines += ["", *table((kind, *(name for name, row in models.items() if kind in row)), rows)]
    return lines


def mode_training(folder: Path) -> list[str]:
    """A row for each mode: the gap of its validation loss to plain Inductor's."""
    found = load(folder, TRAINING)
    rows = [
        (arm, f"{here['gap']:+.2%} ± {here['error']:.2%}", str(here["seeds"]), str(_fell_back(found["runs"][arm])))
        for arm, here in found["summary"].items()
    ]
    return [
        source(TRAINING, found),
        f"The demo's Llama, {found['training']['steps']} steps, FP8 linears alone, emulated, products in FP32.",
        "The gap is the validation loss over plain Inductor's from the same seed, minus 1 (mean of seeds ± standard error).",
        "*Fell back* counts operands of delayed scales and steps in which too much was clipped, over all seeds.",
        "",
        *table(("mode", "gap", "seeds", "fell back"), rows),
    ]


def smooth_swiglu(folder: Path) -> list[str]:
    """A row for each factor by which two channels were made larger: SQNR of the columns of the last linear's gradient."""
    found = load(folder, SMOOTH)
    modes = list(next(iter(found["balanced"].values())))
    rows = [(factor, *(_columns(row[mode]) for mode in modes)) for factor, row in found["balanced"].items()]
    return [
        source(SMOOTH, found),
        f"The demo's Llama after {found['steps']} steps, SwiGLU's last linear in FP8. Two channels of its input were made",
        "larger, and the columns of its weight smaller. SQNR of the columns of its gradient: median / worst 1 %, dB.",
        "",
        *table(("factor", *modes), rows),
    ]


def _columns(row: Mapping[str, Any]) -> str:
    return "{median:.1f} / {worst:.1f}".format(**row["down_columns_db"])


def _fell_back(runs: Mapping[str, Mapping[str, Any]]) -> int:
    return sum(row["fell_back"] for row in runs.values())


def _cell(row: Mapping[str, Any]) -> str:
    return f"{row['worst_db']:.1f} ({row['median_db']:.1f}) / {row['output_db']:.1f}"
