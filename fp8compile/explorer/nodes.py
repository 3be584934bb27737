"""The nodes of all stages of a graph in one table: a node that a pass leaves alone is there once.

A stage is the graph at one moment, as ranges of rows: ``[[first, count], ...]`` for each of its parts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fp8compile.explorer.homes import Home, homes_of
from fp8compile.explorer.strings import Strings
from fp8compile.fx.listing import GraphPart, Line
from fp8compile.fx.snapshot import PassStep, Snapshot

# Of these columns, numbers of strings; ``reads`` holds a list of them, ``nbytes`` and ``view`` hold numbers.
TEXTS = ("name", "kind", "op", "value", "arguments", "module", "source", "spliced", "was", "group")
COLUMNS = (*TEXTS, "nbytes", "view", "reads")


class Nodes:
    """The table; ``rows`` are added by ``stage``."""

    def __init__(self, strings: Strings) -> None:
        self.strings = strings
        self._rows: dict[tuple[Line, Home], int] = {}
        self._stages: dict[Snapshot, int] = {}
        self.stages: list[list[dict[str, Any]]] = []

    def stage(self, snapshot: Snapshot) -> int:
        """The number of a snapshot's stage: an earlier one where nothing has changed."""
        if snapshot not in self._stages:
            self._stages[snapshot] = len(self.stages)
            self.stages.append([self._part(part) for part in snapshot.parts])
        return self._stages[snapshot]

    def _part(self, part: GraphPart) -> dict[str, Any]:
        homes = homes_of(part)
        rows = [self._rows.setdefault((line, homes[line.name]), len(self._rows)) for line in part.lines]
        return {"title": part.title, "rows": ranges(rows)}

    def to_dict(self) -> dict[str, list[Any]]:
        """The columns of the table."""
        found: dict[str, list[Any]] = {name: [] for name in COLUMNS}
        for line, home in self._rows:
            texts = {**vars(line), "arguments": template(line), "module": home.module, "group": home.group}
            for name in TEXTS:
                found[name].append(self.strings.number(texts[name]))
            found["nbytes"].append(line.nbytes)
            found["view"].append(int(line.is_view))
            found["reads"].append([self.strings.number(name) for name in line.reads])
        return found


def passes_of(steps: Sequence[PassStep], nodes: Nodes) -> list[dict[str, Any]]:
    """Each pass with the numbers of the stages before and after it."""
    return [{"name": s.name, "before": nodes.stage(s.before), "after": nodes.stage(s.after)} for s in steps]


def ranges(rows: Sequence[int]) -> list[list[int]]:
    """Numbers as ``[first, count]``, in their order."""
    found: list[list[int]] = []
    for row in rows:
        if found and row == sum(found[-1]):
            found[-1][1] += 1
        else:
            found.append([row, 1])
    return found


def template(line: Line) -> str:
    """The arguments with ``$0`` for the first value that is read: alike in layers that are alike."""
    places = {name: f"${at}" for at, name in enumerate(line.reads)}
    return re.sub(r"[A-Za-z_]\w*", lambda found: places.get(found[0], found[0]), line.arguments)
