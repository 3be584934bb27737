"""The section of docs/results.md about linears in INT8 on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.measured_sections import load, source, table

NAME = "int8-linears-cpu.json"
REFERENCES = ("FP32", "BF16")


def int8_linears(folder: Path) -> list[str]:
    """Layers, products and errors, a table each."""
    found = load(folder, NAME)
    return [
        source(NAME, found),
        f"Vector units that this CPU has: {', '.join(found['units'])}.",
        f"{found['rounds']} rounds, arms in turn, other programs beside them: ratios are medians over rounds.",
        "",
        "Forward and backward of a Llama layer, compiled, with nothing else stored as codes:",
        "",
        *_timed("layer", found["layers"]),
        "",
        "One product, M × K × N, rows of both operands contracted:",
        "",
        *_timed("product", found["products"]),
        "",
        "SQNR in dB of a product against float64, by what the left operand is like; the right one is Gaussian:",
        "",
        *_errors(found["errors"]),
    ]


def _timed(what: str, cases: Mapping[str, Any]) -> list[str]:
    """Milliseconds of each arm, and how many times as fast as the references it is."""
    rows = [
        (
            case,
            arm,
            f"{row['seconds'] * 1e3:.1f}",
            f"{row['least'] * 1e3:.1f}",
            *(_times(row, of) for of in REFERENCES),
        )
        for case, arms in cases.items()
        for arm, row in arms.items()
    ]
    return table((what, "", "median, ms", "least, ms", *(f"times as fast as {of}" for of in REFERENCES)), rows)


def _times(row: Mapping[str, Any], of: str) -> str:
    return f"{row['faster_than'][of]:.2f}"


def _errors(by_kind: Mapping[str, Mapping[str, float]]) -> list[str]:
    formats = list(next(iter(by_kind.values())))
    return table(
        ("left operand", *formats), [(kind, *(f"{row[f]:.1f}" for f in formats)) for kind, row in by_kind.items()]
    )
