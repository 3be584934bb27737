"""The page's data: JSON of the schema ``fp8compile.explorer/1`` (schema.json beside this file describes it).

Texts are numbers into ``strings``. A graph's nodes are one table, in columns; its stages are ranges of rows of that table;
a pass is a pair of stages. So a pass that changes ten nodes of ten thousand adds ten rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fp8compile.explorer.content import TEXT, Bars, PageContent, PageGraph, PageTable
from fp8compile.explorer.layers import alike
from fp8compile.explorer.nodes import Nodes, passes_of
from fp8compile.explorer.picture import CALLERS, KINDS, ON_HOST, REGIONS, KeptValue, Lifetime, MemoryTimeline, Picture
from fp8compile.explorer.strings import Strings
from fp8compile.fx.snapshot import PassStep

SCHEMA = "fp8compile.explorer/1"
SCHEMA_FILE = Path(__file__).with_name("schema.json")

# What happened to a value that the forward hands to the backward.
STORED, OPERAND, LEFT, EXACT, ISLAND, OTHERS = "stored", "operand", "left", "exact", "island", "callers"
CODES, OTHER = "codes and their scales", "of other kinds"  # labels of reporting/waterfall.py


def explorer_json(content: PageContent) -> str:
    """``explorer_data`` as JSON."""
    return json.dumps(explorer_data(content), separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def explorer_data(content: PageContent) -> dict[str, Any]:
    """Everything that the page shows."""
    strings = Strings()
    data = {
        "title": content.title,
        "head": list(content.head),
        "graphs": [_graph(each, content, strings) for each in content.graphs],
        "tables": [_table(each, strings) for each in content.tables],
        "waterfall": _bars(content.bars),
        "frontiers": [{**vars(each), "points": [list(p) for p in each.points]} for each in content.frontiers],
        "modules": [strings.number(path) for path in content.modules],
    }
    return {"schema": SCHEMA, "strings": strings.all, **data}


def _graph(graph: PageGraph, content: PageContent, strings: Strings) -> dict[str, Any]:
    nodes = Nodes(strings)
    passes = passes_of(graph.steps, nodes)
    last = graph.steps[-1].after if graph.steps else None
    picture = graph.picture or Picture()
    return {
        "kind": graph.kind,
        "runs": graph.runs,
        "places": list(graph.places),
        "remarks": list(graph.remarks),
        "peaks": list(graph.peaks),
        "nodes": nodes.to_dict(),
        "stages": nodes.stages,
        "passes": passes,
        "alike": alike(last, content.by_module) if last else [],
        "kept": _kept(picture.kept, graph.steps, strings),
        "timelines": {name: _timeline(getattr(picture, name), strings) for name in ("ours", "plain")},
    }


def _kept(kept: Sequence[KeptValue], steps: Sequence[PassStep], strings: Strings) -> dict[str, list[Any]]:
    fates = Fates(steps)
    texts = {name: [strings.number(getattr(k, name)) for k in kept] for name in ("forward", "backward", "storage")}
    return {
        **texts,
        "nbytes": [k.nbytes for k in kept],
        "label": [strings.number(k.label) for k in kept],
        "fate": [strings.number(fates.of(k)) for k in kept],
    }


class Fates:
    """What happened to values that are kept, by what their label and the forward right after the cut say.

    The backward has names of its own, of which some are those of other nodes in the forward.
    """

    def __init__(self, steps: Sequence[PassStep]) -> None:
        cut = next((step.after for step in steps if len(step.after.parts) > 1), None)
        last = steps[-1].after.parts if steps else ()
        self.at_cut = _names(line.name for part in (cut.parts[:1] if cut else ()) for line in part.lines)
        self.in_islands = _names(line.name for part in last[:1] for line in part.lines if line.was)

    def of(self, kept: KeptValue) -> str:
        if kept.label in (CALLERS, REGIONS, ON_HOST):
            return OTHERS
        if kept.label == CODES:
            return OPERAND if kept.forward in self.at_cut else STORED
        if kept.storage in self.in_islands:
            return ISLAND
        return EXACT if kept.label == OTHER else LEFT


def _names(names: Iterable[str]) -> frozenset[str]:
    return frozenset(names)


def _timeline(timeline: MemoryTimeline, strings: Strings) -> dict[str, Any]:
    def texts(name: str) -> list[int]:
        return [strings.number(getattr(each, name)) for each in timeline.lifetimes]

    return {
        "operations": [strings.number(name) for name in timeline.operations],
        "forward": timeline.forward,
        "kinds": list(KINDS),
        **{name: texts(name) for name in ("name", "value", "module")},
        "kind": [KINDS.index(each.kind) for each in timeline.lifetimes],
        **{name: _numbers(timeline.lifetimes, name) for name in ("start", "end", "nbytes")},
    }


def _numbers(lifetimes: Sequence[Lifetime], name: str) -> list[int]:
    return [getattr(each, name) for each in lifetimes]


def _table(table: PageTable, strings: Strings) -> dict[str, Any]:
    is_text = [kind == TEXT for _, kind in table.columns]
    rows = [[strings.number(str(c)) if t else c for c, t in zip(r.cells, is_text, strict=True)] for r in table.rows]
    return {
        "name": table.name,
        "title": table.title,
        "columns": [list(each) for each in table.columns],
        "graph": [row.graph for row in table.rows],
        "node": [strings.number(row.node) for row in table.rows],
        "rows": rows,
    }


def _bars(bars: Bars) -> dict[str, Any]:
    lists = {name: [list(each) for each in getattr(bars, name)] for name in ("changes", "parts")}
    return {"plain": bars.plain, "ours": bars.ours, **lists}
