"""The section of docs/results.md about bits that are chosen for each saved value, beside the same bits for all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.measured_sections import load, source, table

NAME = "adaptive-bits-cpu.json"
COLUMNS = ("model", "bits", "MB saved", "all gradients, dB", "worst", "median", "chosen")


def adaptive_bits(folder: Path) -> list[str]:
    found = load(folder, NAME)
    rows = [row for name, model in found["models"].items() for row in _rows(name, model["ways"])]
    laws = {name: model["law"] for name, model in found["models"].items()}
    names = list(next(iter(laws.values()))) if laws else []
    law = [(name, *(_spread(by_format[each]) for each in names)) for name, by_format in laws.items()]
    seconds = ", ".join(f"{model['seconds_of_measuring']:.0f} ({name})" for name, model in found["models"].items())
    return [
        source(NAME, found),
        "`fp8compile.tools.calibrate_bits` beside the same bits for all, attention's tensors too; BF16 autocast.",
        "Storage alone, against float64, mean of two batches on which nothing was chosen. In brackets: less uniform.",
        '"auto" is 8 bits, "exact" saves all in its own dtype.',
        "",
        *table(COLUMNS, rows),
        "",
        "How far a value's measured error is above what the square of the step makes of its error in four bits, in dB.",
        "The three figures are those that 10 %, 50 % and 90 % of a model's values are below.",
        "",
        *table(("model", *names), law),
        "",
        f"Seconds of measuring two batches on one core that others used too: {seconds}.",
    ]


def _rows(name: str, ways: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows = []
    for way, row in ways.items():
        other = ways.get(way.replace("adaptive", "uniform")) if way.startswith("adaptive") else None
        figures = (_with_gain(row, other, key) for key in ("total_db", "worst_db", "median_db"))
        formats = row.get("formats", {}) if other else {}
        chosen = ", ".join(f"{count} x {each}" for each, count in formats.items())
        rows.append((name, way, f"{row['saved_bytes'] / 1e6:.3f}", *figures, chosen))
    return rows


def _with_gain(row: Mapping[str, Any], other: Mapping[str, Any] | None, key: str) -> str:
    gain = "" if other is None else f" ({row[key] - other[key]:+.1f})"
    return f"{row[key]:.1f}{gain}"


def _spread(decibels: list[float]) -> str:
    return " / ".join(f"{each:+.1f}" for each in decibels)
