"""The section of docs/results.md on the first step of an optimizer."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness.measured_sections import load, source, table

NAME = "optimizer-first-step.json"
WAYS = ("open", "second", "sm90")


def optimizer_first_step(folder: Path) -> list[str]:
    found = load(folder, NAME)
    rows = [
        (
            row["model"],
            str(row["open"]["parameters"]),
            str(row["open"]["shapes"]),
            str(row["open"]["compiled"]),
            *(f"{row[way]['seconds']:.1f}" for way in WAYS),
            str(row["sm90"]["launches"]),
        )
        for row in found["rows"]
    ]
    head = ("model", "parameters", "shapes", "compiled", "s", "s, second process", "s, for an H100", "launches there")
    return [
        source(NAME, found),
        "AdamW with states in e4m3_expanded: seconds of the first step over those of the next, by one compiling thread.",
        "On a CPU of FP32 parameters; for an H100 of BF16 ones: each kernel lowered and assembled, none was run. Moving a",
        "graph to a device that is not there, and disassembly, are not counted.",
        "Launches are those that update parameters: one for each kernel, whatever the number of parameters.",
        "",
        *table(head, rows),
    ]
