"""The section of docs/results.md on modes of torch.distributed."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness.measured_sections import load, source, table


def distributed(folder: Path) -> list[str]:
    found = load(folder, "distributed-cpu.json")
    said = {True: "equal", False: "differ", None: ""}
    rows = [
        (
            name,
            str(row["world"]),
            row["dtype"],
            "codes too" if row["stored_codes"] else "linears alone",
            said[row["losses"]],
            said[not (row["parameters"] or row["states"])],
            f"{row['linears']} of {row['of']}",
            said[row["scales"]],
            "on all ranks" if row["counts"] and not row["counts_alone"] else said[row["counts"]],
        )
        for name, row in found.items()
    ]
    head = (
        "mode",
        "ranks",
        "dtype",
        "compared",
        "losses",
        "parameters, states",
        "matmuls in FP8",
        "loss scale",
        "counts",
    )
    return [
        source("distributed-cpu.json", next(iter(found.values()))),
        "gloo; four steps, bit for bit against one process that quantizes per shard.",
        "",
        *table(head, rows),
    ]
