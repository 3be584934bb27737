"""Graphviz DOT of a graph: a box a node, coloured by kind, an edge from each value to what reads it.

The text is written here, without a package: ``dot -Tsvg after.dot`` draws it. Large graphs are folded first
(fp8compile/fx/folding.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from fp8compile.fx.listing import RETURNED, GraphPart, Line

COLOURS = {
    "input": "#d9e8fb",  # parameters, inputs, what the forward saved
    "matmul": "#fbd9a8",  # matmuls, convolutions, attention
    "spliced": "#c6ecc6",  # put there by fp8compile
    "other": "#f4f4f4",
    "output": "#d9e8fb",
}
# Straight edges and bounds on the search for short ones and for few crossings, which take dot most of its time.
SEARCH = ("nslimit=1", "nslimit1=1", "mclimit=0.1")
SETTINGS = ("rankdir=TB", "splines=line", *SEARCH, 'node [shape=box, style=filled, fontname="monospace"]')


def to_dot(parts: Sequence[GraphPart]) -> str:
    """One digraph; a graph with a title is a cluster of its own."""
    lines = ["digraph fp8compile {", *(f"  {each};" for each in SETTINGS)]
    for index, part in enumerate(parts):
        if part.title:
            lines += [f"  subgraph cluster_{index} {{", f"  label={quoted(part.title)};"]
        lines += [text for line in part.lines for text in _statements(line, part.title)]
        if part.title:
            lines.append("  }")
    return "\n".join([*lines, "}", ""])


def quoted(*lines: str) -> str:
    """A DOT string of these lines; quotes and backslashes in them are escaped."""
    return '"' + "\\n".join(line.replace("\\", "\\\\").replace('"', '\\"') for line in lines if line) + '"'


def _statements(line: Line, title: str) -> list[str]:
    here = _id(line.name, title)
    label = quoted(line.name, line.op if line.op != line.name else "", line.value, line.comment)
    double = ", peripheries=2" if line.op.endswith(RETURNED) else ""
    return [
        f'  {here} [label={label}, fillcolor="{COLOURS[line.kind]}"{double}];',
        *(f"  {_id(name, title)} -> {here};" for name in line.reads),
    ]


def _id(name: str, title: str) -> str:
    return quoted(f"{title}/{name}" if title else name)
