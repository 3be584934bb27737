"""Tables of what generated kernels are predicted to take, by bytes and instructions, from code lowered without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.harness.measured_sections import load, source, table

OPTIMIZER, LAYERS = "optimizer-instructions-sm90-lowered.json", "layer-instructions-sm90-lowered.json"
PLACES = {"instructions": 0, "slow": 1, "registers": 0, "spilled": 0, "predicted_ms": 2}
SLOW = "Slow ones are those that half of the lanes or fewer take: roots, logarithms, conversions."


def optimizer_instructions(folder: Path) -> list[str]:
    found = load(folder, OPTIMIZER)
    rows = [
        (row["format"], row["dtype"], *(f"{row[key]:.{places}f}" for key, places in PLACES.items()))
        for row in found["rows"]
    ]
    head = ("format", "parameters", "instructions", "slow ones", "registers", "bytes spilled", "predicted ms")
    return [
        source(OPTIMIZER, found),
        "AdamW by state format, an element, of 256M elements; the kernel of one launch for all parameters.",
        SLOW,
        "",
        *table(head, rows),
    ]


def layer_instructions(folder: Path) -> list[str]:
    """Each layer and pipeline, and what it was before kernels were looked at by their instructions."""
    found = load(folder, LAYERS)
    before = {(row["layer"], row["pipeline"]): row for row in found["before"]["rows"]}
    rows = [
        (row["layer"], row["pipeline"], *_now_and_before(row, before[row["layer"], row["pipeline"]]))
        for row in found["rows"]
    ]
    head = ("layer", "kernels of", "predicted µs", "before", "bytes alone", "before", "launches", "before")
    return [
        source(LAYERS, found),
        "Generated kernels of forward and backward, without matmuls and attention. Each takes the longest of its bytes, its",
        f"instructions and its slow ones at rates that an H200 reached. Before: commit {found['before']['commit']}. {SLOW}",
        "",
        *table(head, rows),
    ]


def _now_and_before(now: dict[str, Any], before: dict[str, Any]) -> tuple[str, ...]:
    return tuple(f"{row[key]:.0f}" for key in ("us", "bytes_us", "launches") for row in (now, before))
