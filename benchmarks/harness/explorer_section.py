"""The section of docs/results.md about the explorer's page: its size, how soon it can be used, how it moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.measured_sections import load, source, table

FILE = "explorer-cpu.json"


def explorer(folder: Path) -> list[str]:
    found = load(folder, FILE)
    pages = found["pages"]
    head = (
        "layers, recipe",
        "nodes",
        "file, MB",
        "interactive, s: median (worst)",
        "with the browser's answers, s",
        "frames a second: median (worst)",
        "far out: median (worst)",
        "nodes in sight there",
    )
    missed = [f"{_name(page)}: {', '.join(page['missed'])}" for page in pages if page["missed"]]
    quiet = not any(page["errors"] or page["requests"] for page in pages)
    return [
        source(FILE, found),
        f"The page of a report on Llama-2-7B's layers, in a headless {found['browser']} of 1280 × 800, drawn without a GPU.",
        "*Interactive*: from navigation until a click has selected a box, by the page's clock.",
        "*Frames*: all boxes are open, and the wheel pans or zooms at the width of the graph.",
        "*Far out*: further than the wheel goes, so that each frame draws at least 2,000 nodes.",
        "Of panning and zooming the slower counts. There are at most 60 frames a second.",
        "The machine was used by others too.",
        "No page made a request or logged an error." if quiet else "**A page made a request or logged an error.**",
        f"**Goals missed: {'; '.join(missed)}.**" if missed else "Each goal of the study is reached.",
        "",
        *table(head, map(_row, pages)),
    ]


def _name(page: Mapping[str, Any]) -> str:
    return f"{page['layers']}, {page['recipe']}"


def _row(page: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        _name(page),
        f"{page['boxes']:,}",
        f"{page['bytes'] / 1e6:.2f}",
        *(f"{page[clock]['median']:.2f} ({page[clock]['worst']:.2f})" for clock in ("interactive", "wall")),
        *(_frames(page[where]) for where in ("near", "far")),
        f"{min(each['visible'] for each in page['far']):,}",
    )


def _frames(moves: Sequence[Mapping[str, Any]]) -> str:
    """Of panning and zooming the slower."""
    return f"{min(each['median'] for each in moves):.0f} ({min(each['worst'] for each in moves):.0f})"
