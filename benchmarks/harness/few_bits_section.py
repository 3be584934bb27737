"""The section of docs/results.md about few bits per element: a Llama layer in each choice, and models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.measured_sections import load, source, table

NAME = "few-bits-cpu.json"
LEAST = "least-bits-cpu.json"


def few_bits(folder: Path) -> list[str]:
    found = load(folder, NAME)
    layer = [
        (
            name,
            f"{row['units']:.2f} U",
            f"{row['worst_db']:.1f} ({row['worst_parameter']})",
            f"{row['median_db']:.1f}",
        )
        for name, row in found["layer"].items()
    ]
    ways = list(next(iter(found["models"].values()))["ways"]) if found["models"] else []
    models = [(name, *(_cell(row["ways"][way]) for way in ways)) for name, row in found["models"].items()]
    return [
        source(NAME, found),
        "A Llama layer as initialised, BF16, storage alone; gradients of a random projection against float64.",
        'Attention is in as many bits unless the row says otherwise. "o 2" is the output projection\'s result, by module.',
        "",
        *table(("bits", "saved", "worst gradient, dB", "median, dB"), layer),
        "",
        *_least(folder),
        "",
        "Models under BF16 autocast after some steps: MB saved, worst (median) gradient in dB.",
        'Attention is in 8 bits but in "6bit" and where the column says so.',
        "",
        *table(("model", *ways), models),
    ]


def _least(folder: Path) -> list[str]:
    """Of every choice of bits for the layer's values, the one whose worst gradient is best."""
    found = load(folder, LEAST)
    rows = [
        (
            f"{row['at_most']:g} U",
            f"{row['units']:.2f} U",
            f"{row['worst_db']:.1f} ({row['predicted_db']:.1f})",
            _used(row),
        )
        for row in found["best"]
    ]
    return [
        source(LEAST, found),
        f"The same layer's values have {found['choices']:,} choices of bits in groups of 128. These are the ones whose worst "
        "gradient is best, by the sum of their errors. In brackets is what that sum predicts.",
        "",
        *table(("at most", "saved", "worst gradient, dB", "formats"), rows),
    ]


def _used(row: Mapping[str, Any]) -> str:
    counts = sorted(Counter(row["formats"].values()).items())
    return ", ".join(f"{count} x {name}" for name, count in counts)


def _cell(row: Mapping[str, Any]) -> str:
    return f"{row['saved_bytes'] / 1e6:.2f}: {row['worst_db']:.1f} ({row['median_db']:.1f})"
