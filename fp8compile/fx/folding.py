"""A graph with fewer nodes and no long edges, to be drawn: what a large one needs before dot can lay it out.

    several nodes of one call that was spliced in   one node, "encode INT8 per 128"
    views, one of several results                   gone: their readers read what they are a view of
    the output                                      gone: each returned value is marked
    an input                                        beside its first reader
    an edge over more than FAR nodes                a line in the reader: "reads mul_3, far above"

The text of the graph and the expanded drawing have all nodes and edges.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence

from fp8compile.fx.listing import RETURNED, GraphPart, Line
from fp8compile.numerics.formats import E4M3, E5M2, INT8

FAR = 20
FORMATS = {str(f.dtype).removeprefix("torch."): f.name.upper() for f in (E4M3, E5M2, INT8)}


def folded(part: GraphPart) -> GraphPart:
    """The same graph, folded."""
    known, readers = {line.name: line for line in part.lines}, readers_of(part.lines)
    lines, stands_for = dict(known), dict[str, str]()
    for call in calls(part.lines):
        if len(call) > 1:
            stands_for |= dict.fromkeys((line.name for line in call), call[-1].name)
            lines[call[-1].name] = as_one(call, known, readers)
    for line in part.lines:
        if line.is_view and line.reads and line.name not in stands_for:
            stands_for[line.name] = stands_for.get(line.reads[0], line.reads[0])
    kept = [_redirected(line, stands_for) for name, line in lines.items() if stands_for.get(name, name) == name]
    results = {stands_for.get(n, n) for line in kept if line.kind == "output" for n in line.reads}
    marked = [dataclasses.replace(k, op=k.op + RETURNED) if k.name in results else k for k in kept]
    return GraphPart(part.title, _without_long_edges([k for k in marked if k.kind != "output"]))


def readers_of(lines: Sequence[Line]) -> dict[str, set[str]]:
    """By node, the nodes that read it."""
    readers: dict[str, set[str]] = {}
    for line in lines:
        for name in line.reads:
            readers.setdefault(name, set()).add(line.name)
    return readers


def calls(lines: Sequence[Line]) -> list[list[Line]]:
    """The nodes of each spliced call: they have the same mark, and follow one another or read each other."""
    calls: list[list[Line]] = []
    latest: dict[str, list[Line]] = {}  # by mark
    for before, line in itertools.pairwise((None, *lines)):
        assert line is not None
        if not line.spliced:
            continue
        call = latest.get(line.spliced, [])
        if not call or not (before is call[-1] or {each.name for each in call} & set(line.reads)):
            call = latest[line.spliced] = []
            calls.append(call)
        call.append(line)
    return calls


def as_one(call: Sequence[Line], lines: Mapping[str, Line], readers: Mapping[str, set[str]]) -> Line:
    """One line for a call: what it reads from outside, and its results."""
    inside = {line.name for line in call}
    reads = tuple(dict.fromkeys(n for line in call for n in line.reads if n not in inside))
    results = [line.value for line in call if readers.get(line.name, set()) - inside] or [call[-1].value]
    name = call[0].spliced.partition("(")[0]
    codes_and_scales = [lines[n].value for n in reads] if name == "decode" else results
    label = f"{name}{_format(codes_and_scales)}, {len(call)} nodes"
    return dataclasses.replace(
        call[-1], op=label, value=", ".join(dict.fromkeys(results)), reads=reads, is_view=False
    )


def _format(values: Iterable[str]) -> str:
    """The format of the codes among these values and the elements to a scale, `` INT8 per 128``; "" where there are none."""
    sizes = [(found[1], found[2]) for value in values if (found := re.fullmatch(r"(\w+)\[(.*)\]", value))]
    codes = [(FORMATS[dtype], _numel(shape)) for dtype, shape in sizes if dtype in FORMATS]
    scales = [n for dtype, shape in sizes if dtype not in FORMATS and (n := _numel(shape))]
    if not codes:
        return ""
    name, numel = codes[0]
    groups = min(scales, default=None)
    per = "" if not numel or not groups else " per tensor" if groups == 1 else f" per {-(-numel // groups)}"
    return f" {name}{per}"


def _numel(shape: str) -> int | None:
    sizes = [size.strip() for size in shape.split(",") if size.strip()]
    return math.prod(map(int, sizes)) if all(size.isdigit() for size in sizes) else None


def _redirected(line: Line, stands_for: Mapping[str, str]) -> Line:
    reads = (stands_for.get(n, n) for n in line.reads)
    return dataclasses.replace(line, reads=tuple(dict.fromkeys(n for n in reads if n != line.name)))


def _without_long_edges(lines: Sequence[Line]) -> tuple[Line, ...]:
    """Put inputs before their first reader; a reader that is far from what it reads names it."""
    inputs = {line.name: line for line in lines if line.kind == "input"}
    ordered: list[Line] = []
    for line in lines:
        if line.kind != "input":
            ordered += [inputs.pop(n) for n in line.reads if n in inputs]
            ordered.append(line)
    ordered += inputs.values()
    place = {line.name: at for at, line in enumerate(ordered)}
    made = []
    for at, line in enumerate(ordered):
        far = [n for n in line.reads if at - place[n] > FAR]
        note = "; ".join(filter(None, (line.comment, f"reads {', '.join(far)}, far above" if far else "")))
        made.append(dataclasses.replace(line, comment=note, reads=tuple(n for n in line.reads if n not in far)))
    return tuple(made)
