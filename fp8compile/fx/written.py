"""A graph as a page to read: one line each operation, and one each call of a codec, where it comes from at the right.

    addmm_codes, addmm_inv_scale: int8[64, 256], bf16[128, 1] = fp8.encode(addmm)  # INT8 per 128, 18 nodes  up  model.py:12

A call whose results are needed before its last node is written node by node.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Sequence

from fp8compile.fx.folding import as_one, calls, readers_of
from fp8compile.fx.listing import GraphPart, Line

PREFIX = "fp8."
WIDTH = 100  # characters up to which a line is filled before its comment


def written(part: GraphPart) -> str:
    """All lines of a graph."""
    return "\n".join(map(_text, _lines(part)))


def with_context(before: str, after: str) -> str:
    """The lines of two texts that differ, with three around each place; "" where none does."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), "before", "after", lineterm="")
    return "".join(f"{line}\n" for line in lines)


def _lines(part: GraphPart) -> Iterator[Line]:
    known, readers = {line.name: line for line in part.lines}, readers_of(part.lines)
    place = {line.name: at for at, line in enumerate(part.lines)}
    one: dict[str, Line | None] = {}  # by node: what stands in its place
    for call in calls(part.lines):
        inside = {line.name for line in call}
        outside = [name for line in call for name in readers.get(line.name, ()) if name not in inside]
        if len(call) > 1 and all(place[name] > place[call[-1].name] for name in outside):
            one |= dict.fromkeys(inside) | {call[-1].name: _call(call, known, readers)}
    for line in part.lines:
        if (found := one.get(line.name, line)) is not None:
            yield found


def _call(call: Sequence[Line], known: Mapping[str, Line], readers: Mapping[str, set[str]]) -> Line:
    inside = {line.name for line in call}
    whole = as_one(call, known, readers)
    results = [line for line in call if readers.get(line.name, set()) - inside] or [call[-1]]
    name = call[0].spliced.partition("(")[0]
    return dataclasses.replace(
        whole,
        name=", ".join(line.name for line in results),
        value=", ".join(line.value for line in results),
        op=f"{PREFIX}{name}",
        arguments=", ".join(whole.reads),
        comment="  ".join(filter(None, (whole.op.removeprefix(name).strip(", "), call[-1].module))),
    )


def _text(line: Line) -> str:
    place = line.source.partition(" ")[0]
    comment = "  ".join(filter(None, (line.comment, place)))
    bare = str(dataclasses.replace(line, comment=""))
    return f"{bare:<{WIDTH}}  # {comment}" if comment and line.kind != "output" else bare
