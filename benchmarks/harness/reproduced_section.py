"""The section of docs/results.md about published ablations: the tables that ``fp8compile reproduce`` wrote.

python -m benchmarks.papers NAME --out benchmarks/results     then NAME.json -> reproduce-NAME-cpu.json
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.measured_sections import load, source, table
from benchmarks.papers.outcome import cell_text
from benchmarks.papers.papers import PAPERS


def name_of(paper: str) -> str:
    """The file of a paper's figures."""
    return f"reproduce-{paper}-cpu.json"


def reproduced(folder: Path) -> list[str]:
    lines = ["`python -m benchmarks.papers NAME`: [what differs from each paper](guide/reproducing.md)."]
    for paper in PAPERS:
        found = load(folder, name_of(paper))
        lines += [
            "",
            f"### {paper}: {PAPERS[paper].title.split(',')[0]}",
            "",
            source(name_of(paper), found),
            _told(found),
        ]
        for each in found["tables"]:
            rows = [tuple(cell_text(cell) for cell in row.values()) for row in each["rows"]]
            lines += ["", f"{each['title']}.", "", *table(tuple(each["rows"][0]), rows)]
    return lines


def _told(found: Mapping[str, Any]) -> str:
    cores, seconds = found["environment"]["cpus"], found["seconds"]
    seeds = f"{found['seeds']} seed{'s' if found['seeds'] > 1 else ''}"
    return f"{seeds}, {found['steps']} steps; {seconds:.0f} s on {cores} cores that others used too."
