"""The section of docs/results.md on other libraries' bars for optimizer states."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness.measured_sections import load, source, table

NAME = "state-bars-cpu.json"


def state_bars(folder: Path) -> list[str]:
    found = load(folder, NAME)
    cases = list(next(iter(found["update"].values())))
    shown = [case for case in cases if not case.startswith("ones")]
    updates = [(name, *(f"{row[case]:.4f}" for case in shown)) for name, row in found["update"].items()]
    floors = [
        (name, *(f"{row[levels]:.4f}" for levels in ("3", "7", "15", "16"))) for name, row in found["floor"].items()
    ]
    trips = [
        (name, str(row["cases"]), str(row["cosine"]), str(row["mean error"]))
        for name, row in found["round_trip"].items()
    ]
    return [
        source(NAME, found),
        "FlashOptim's test of updates: NMSE of what ten steps of AdamW have moved, against FP32 states; its bar is 0.01.",
        'With "ones" all are exact. Normal gradients are ours. A pair is m / v.',
        "",
        *table(("states", *shown), updates),
        "",
        "The least error of one encoding by so many levels of one group, chosen at will. Seven are four bits with a sign.",
        "",
        *table(("values", "3 levels", "7", "15", "16"), floors),
        "",
        "FlashOptim's round trip of a second moment: cases out of its bounds.",
        "",
        *table(("format", "cases", "cosine", "mean error"), trips),
        "",
        "BF16 weights beside FP32 ones: mean relative distance. bitsandbytes' bound is 0.0016.",
        "",
        *table(("master, steps", "distance"), [(name, f"{x:.5f}") for name, x in found["bf16"].items()]),
    ]
