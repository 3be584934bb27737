"""The section of docs/results.md about the set-ups that an H200 was timed on, lowered and priced without one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.first.comparisons import MODELS, PLAIN, timed
from benchmarks.first.readings import readings
from benchmarks.harness.measured_sections import load, source, table

NAME = "table-sm90-lowered.json"
ARMS = {
    PLAIN: "plain Inductor",
    "storage_worth": "storage alone",
    "default": "default",
    "all_codes": '`saved.max_cost="any"`',
}
SETUP = "setup-"  # how a set-up's name begins
GENERATED = "triton"  # how names of generated kernels begin


def whole(row: Mapping[str, Any], what: str) -> float:
    """A figure of the whole model: that of the fewer layers, and for each of the rest what one more of them added."""
    by_depth = {int(depth): found[what] for depth, found in row["lowered"].items()}
    if len(by_depth) == 1:
        return float(*by_depth.values())
    fewer, more = sorted(by_depth)
    return float(by_depth[fewer] + (row["layers"] - fewer) * (by_depth[more] - by_depth[fewer]) / (more - fewer))


def microseconds(row: Mapping[str, Any]) -> float:
    """Of kernels and calls."""
    return whole(row, "us") + whole(row, "calls_us")


def device_table(folder: Path) -> list[str]:
    """A row for each set-up and recipe, beside what plain Inductor's generated kernels took."""
    found, read = load(folder, NAME), _read(folder)
    head = (
        "set-up",
        "recipe",
        "kernels, ms",
        "read",
        "calls, ms",
        "read",
        "launches",
        "plain / this",
        "kept of plain",
    )
    return [
        source(NAME, found),
        "The set-ups that an [H200](#gpu) was timed on, forward and backward at the sizes of that table, from code generated",
        "for an H100 without one. *Kernels* are generated ones, [predicted](#kernels-read-on-an-h200) from their machine",
        "code. *Calls* are matmuls, convolutions and attention, by a roofline with the rates that the H200 reached in large",
        "ones. *Read* is what plain Inductor's took on the H200 (torch 2.11). ResNet-50 is lowered whole; of the others two",
        "layers and three, and what the third added counts for each of the rest. Waiting for the host is not predicted.",
        "A cosine counts with a branch for large angles that is not taken, so rotary embeddings are predicted too long.",
        "",
        *table(head, _rows(found["rows"], read)),
    ]


def _rows(rows: list[dict[str, Any]], read: Mapping[str, tuple[float, float]]) -> Iterator[tuple[str, ...]]:
    plain = {row["setup"]: row for row in rows if row["arm"] == PLAIN}
    for row in rows:
        beside, is_plain = plain[row["setup"]], row["arm"] == PLAIN
        of_device = [f"{us / 1e3:.1f}" for us in read[row["setup"]]] if is_plain else ["", ""]
        yield (
            MODELS[SETUP + row["setup"]] if is_plain else "",
            ARMS[row["arm"]],
            f"{whole(row, 'us') / 1e3:.1f}",
            of_device[0],
            f"{whole(row, 'calls_us') / 1e3:.1f}",
            of_device[1],
            f"{whole(row, 'launches') + whole(row, 'externs'):.0f}",
            f"{microseconds(beside) / microseconds(row):.2f}",
            f"{whole(row, 'kept') / whole(beside, 'kept'):.0%}",
        )


def _read(folder: Path) -> dict[str, tuple[float, float]]:
    """By set-up: microseconds that plain Inductor's generated kernels took, and all else."""
    found = {}
    for reading in readings(folder):
        for row in timed(reading.found):
            if row.way == PLAIN and row.model.startswith(SETUP) and row.profile:
                generated = sum(us for name, _, us in row.profile["kernels"] if name.startswith(GENERATED))
                found[row.model.removeprefix(SETUP)] = generated, row.profile["device_us"] - generated
    return found
