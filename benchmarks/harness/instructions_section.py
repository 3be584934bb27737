"""Tables of what generated kernels are predicted to take, by bytes and instructions, from code lowered without a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.kernel_time import BYTES, error, read, totals
from benchmarks.harness.measured_sections import load, source, table

OPTIMIZER, LAYERS = "optimizer-instructions-sm90-lowered.json", "layer-instructions-sm90-lowered.json"
READ = "kernels-h200-read.json"
LARGEST, NAMED = 3, 60  # kernels of a run; letters of a name
PLACES = {"instructions": 0, "slow": 1, "registers": 0, "spilled": 0, "predicted_ms": 2}
SLOW = "Slow ones are those of the special function units: exponentials, logarithms, roots, reciprocals."


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


def kernels_read(folder: Path) -> list[str]:
    """The kernels of each run, what they took and what is predicted for them."""
    found = load(folder, READ)
    runs: dict[str, list[dict[str, Any]]] = {}
    for row in found["rows"]:
        runs.setdefault(row["run"], []).append(row)
    head = ("run", "kernels", "ms read", "ms predicted", "predicted / read", "by bytes alone")
    return [
        source(READ, found),
        "Generated kernels whose text and time were kept, and what is predicted for them: a launch, and the longest of",
        "bytes, instructions and slow ones. It counts the more the fewer warps a multiprocessor holds. A kernel is off by",
        f"{error(found['rows']) * 100:.0f} %: the root of the mean square, by time. Two constants were fitted to it.",
        "",
        *table(head, [(run, *_read(rows)) for run, rows in [*runs.items(), ("all", found["rows"])]]),
        "",
        f"The {LARGEST} kernels of each run that took the most time, a launch of each:",
        "",
        *table(("run", "kernel", "launches", "µs read", "µs predicted", "predicted / read"), _largest(runs)),
    ]


def _largest(runs: Mapping[str, list[dict[str, Any]]]) -> Iterator[tuple[str, ...]]:
    for run, rows in runs.items():
        for row in sorted(rows, key=lambda row: -row["launches"] * row["read_us"])[:LARGEST]:
            us = read(row).us
            times = f"{row['read_us']:.1f}", f"{us:.1f}", f"{us / row['read_us']:.2f}"
            yield run, f"`{row['kernel'][:NAMED]}`", str(row["launches"]), *times


def _read(rows: list[dict[str, Any]]) -> tuple[str, ...]:
    mine, told = totals(rows)
    by_bytes = sum(row["launches"] * row["num_bytes"] / BYTES * 1e6 for row in rows)
    return str(len(rows)), f"{told / 1e3:.1f}", f"{mine / 1e3:.1f}", f"{mine / told:.2f}", f"{by_bytes / told:.2f}"


def layer_instructions(folder: Path) -> list[str]:
    """Each layer and pipeline: generated kernels, matmuls, and both beside plain Inductor's."""
    found = load(folder, LAYERS)
    plain = {row["layer"]: _device_us(row) for row in found["rows"] if row["pipeline"] == "plain Inductor"}
    rows = [(row["layer"], row["pipeline"], *_times(row, plain[row["layer"]])) for row in found["rows"]]
    head = (
        "layer",
        "pipeline",
        "generated kernels, µs",
        "bytes alone",
        "launches",
        "matmuls, µs",
        "plain / this",
        "kept, MB",
    )
    return [
        source(LAYERS, found),
        "Forward and backward, without attention. Kernels as [predicted](#kernels-read-on-an-h200) for an H200; matmuls",
        'by the rates that one reached. "plain / this" compares both together, where a device does not wait for its host.',
        "*Kept* is what the backward is given beside parameters: what the forward made, and the layer's input.",
        "",
        *table(head, rows),
    ]


def _device_us(row: dict[str, Any]) -> float:
    return float(row["us"] + row["matmuls_us"])


def _times(row: dict[str, Any], plain: float) -> tuple[str, ...]:
    return (
        *(f"{row[key]:,.0f}" for key in ("us", "bytes_us", "launches", "matmuls_us")),
        f"{plain / _device_us(row):.2f}",
        f"{row['kept'] / 1e6:,.0f}" if "kept" in row else "",
    )
