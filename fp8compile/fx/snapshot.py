"""A graph as text that does not change from run to run, ``name: dtype[shape] = op(arguments)``: one line a node, and one a
call of a codec (``written.py``).

The text is made while a pass runs, since the graph changes afterwards. Nothing here is part of a cache key (see
fp8compile/compiler/watchers.py).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fp8compile import _torch as private
from fp8compile.fx import dot
from fp8compile.fx.folding import folded
from fp8compile.fx.graph import SPLICED, WIDENED, behind, dtype_text, nbytes, shape_text
from fp8compile.fx.listing import GraphPart, Line
from fp8compile.fx.ops import is_view
from fp8compile.fx.partition import PartitionedGraph
from fp8compile.fx.provenance import module_path, source_line
from fp8compile.fx.written import with_context, written

MATMUL_WORDS = ("mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "convolution", "attention", "mv", "dot")


@dataclass(frozen=True)
class Snapshot:
    """A graph at one moment, or a forward and a backward graph.

    Attributes:
        parts: the graphs by title; one without a title where there is only one.
        saved_bytes: of two graphs, what stays alive between them; None where that is not known.
    """

    parts: tuple[GraphPart, ...]
    saved_bytes: int | None = field(default=None, compare=False)

    @property
    def is_half(self) -> bool:
        """Whether it is a forward or a backward by itself."""
        return len(self.parts) == 1 and bool(self.parts[0].title)

    @cached_property
    def text(self) -> str:
        """Each graph under its title, a codec's call in one line."""
        return _pages(self.parts, written)

    @property
    def full_text(self) -> str:
        """The same with every node in a line of its own."""
        return _pages(self.parts, lambda part: "\n".join(map(str, part.lines)))

    @property
    def counts(self) -> Mapping[str, int]:
        """How often each op occurs, inputs left out."""
        return sum((Counter(part.counts) for part in self.parts), Counter())

    def to_dot(self, expand: bool = False) -> str:
        """The same as Graphviz DOT, each call that fp8compile put in folded to one node; ``expand``: all nodes and edges."""
        return dot.to_dot(self.parts if expand else [folded(part) for part in self.parts])

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class PassStep:
    """A pass and the graph before and after it."""

    name: str
    before: Snapshot = field(repr=False)
    after: Snapshot = field(repr=False)

    @property
    def numbers(self) -> str:
        """``encode_saved: 64 -> 103 operations, 98,304 -> 33,792 bytes saved for backward``."""
        counts = [sum(each.counts.values()) for each in (self.before, self.after)]
        text = f"{self.name}: {counts[0]:,} -> {counts[1]:,} operations"
        saved = [each.saved_bytes for each in (self.before, self.after)]
        known = [f"{each:,}" for each in saved if each is not None]
        return text + (f", {' -> '.join(known)} bytes saved for backward" if known else "")

    @property
    def diff(self) -> str:
        """The ops whose number changed; then the lines that did, with some around them."""
        table = op_diff(self.before, self.after)
        lines = with_context(self.before.text, self.after.text)
        return f"{table}\n{lines}" if lines else table


def snapshot(graph: Graph, title: str = "") -> Snapshot:
    """The graph as it stands."""
    return Snapshot((_part(title, graph),))


def snapshot_of(seen: GraphModule | PartitionedGraph | tuple[GraphModule, GraphModule], title: str = "") -> Snapshot:
    """The graph of a module, under a title, or both graphs of a cut one; of a PartitionedGraph, as its ``finish`` will leave
    them."""
    if isinstance(seen, GraphModule):
        return snapshot(seen.graph, title)
    if isinstance(seen, PartitionedGraph):
        bw = seen.bw.graph
        parts = (_part("forward", seen.fw.graph, seen.results), _part("backward", bw, bw.output_node().args[0]))
        return Snapshot(parts, seen.saved_bytes())
    return Snapshot((_part("forward", seen[0].graph), _part("backward", seen[1].graph)))


def _pages(parts: tuple[GraphPart, ...], page: Callable[[GraphPart], str]) -> str:
    return "\n\n".join(f"# {part.title}\n" * bool(part.title) + page(part) for part in parts) + "\n"


def op_diff(before: Snapshot, after: Snapshot) -> str:
    """A table of the ops whose number changed, graph by graph where both have the same graphs; else "no change"."""
    if [p.title for p in before.parts] != [p.title for p in after.parts]:
        return _table(before.counts, after.counts)
    tables = [(b.title, _table(b.counts, a.counts)) for b, a in zip(before.parts, after.parts, strict=True)]
    return "\n".join(f"# {title}\n{table}" if title else table for title, table in tables)


def _table(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    rows = [(op, before.get(op, 0), after.get(op, 0)) for op in sorted({*before, *after})]
    rows = [row for row in rows if row[1] != row[2]]
    if not rows:
        return "no change\n"
    width = max(len(op) for op, _, _ in rows)
    lines = [f"{'op':{width}}  before  after  change"]
    lines += [f"{op:{width}}  {b:6}  {a:5}  {a - b:+6}" for op, b, a in rows]
    return "\n".join(lines) + "\n"


def _part(title: str, graph: Graph, results: Any = None) -> GraphPart:
    """``results``: what the graph will return, if its output is not written yet; nodes that they do not need are left out."""
    out = graph.output_node()
    returned = out.args[0] if results is None else results
    live = set(graph.nodes) if results is None else _live(graph, returned)
    lines = [_line(node) for node in graph.nodes if node in live and node is not out]
    flat = returned if isinstance(returned, (tuple, list)) else (returned,)
    reads = tuple(dict.fromkeys(n.name for n in flat if isinstance(n, Node)))
    return GraphPart(title, (*lines, Line(out.name, "output", "output", "", ", ".join(map(_text, flat)), "", reads)))


def _live(graph: Graph, returned: Any) -> set[Node]:
    """What dead code elimination keeps: what the results need, inputs, and what has an effect."""
    waiting = [n for n in graph.nodes if n.op == "placeholder" or (n.is_impure() and n.op != "output")]
    waiting += [n for n in returned if isinstance(n, Node)]
    return behind(waiting)


def _line(node: Node) -> Line:
    op = _op(node)
    arguments = [_text(a) for a in node.args] + [f"{name}={_text(a)}" for name, a in node.kwargs.items()]
    spliced = node.meta.get(SPLICED) or (WIDENED in node.meta and "FP32 island")
    module = module_path(node)
    comment = "; ".join(filter(None, (module, f"fp8compile: {spliced}" if spliced else "")))
    reads = tuple(n.name for n in node.all_input_nodes)
    mark = node.meta.get(SPLICED)
    call = mark if isinstance(mark, str) and node.op == "call_function" else ""  # inputs of a half bear marks too
    passes_on = is_view(node) or node.target is private.getitem
    return Line(
        node.name, _kind(node, op), op, _value(node), ", ".join(arguments), comment, reads, call, passes_on,
        module, source_line(node), _nbytes(node), node.meta.get(WIDENED, ""),
    )  # fmt: skip


def _kind(node: Node, op: str) -> str:
    if node.op in ("placeholder", "get_attr"):
        return "input"
    if node.meta.get(SPLICED):
        return "spliced"
    words = re.split(r"[._]", op)
    return "matmul" if any(word in MATMUL_WORDS for word in words) else "other"


def _op(node: Node) -> str:
    if node.op == "placeholder":
        return "input"
    if node.op in ("get_attr", "call_module", "call_method"):
        return f"{node.op} {node.target}"
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target)
    return str(getattr(node.target, "__name__", None) or _text(node.target))


def _value(node: Node) -> str:
    return _described(node.meta.get("val", node.meta.get("example_value")))


def _nbytes(node: Node) -> int:
    values = private.tree_leaves(node.meta.get("val"))
    return sum(nbytes(value) for value in values if isinstance(value, torch.Tensor))


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return dtype_text(value) + shape_text(value.shape)
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(_described(v) or "None" for v in value) + ")"
    return "" if value is None else str(value) if isinstance(value, (torch.SymInt, int)) else type(value).__name__


def _text(value: object) -> str:
    """An argument: nodes by name, containers item by item, and nothing that would differ in the next run."""
    if isinstance(value, Node):
        return value.name
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(map(_text, value)) + "]"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(_text, value))) + "}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_text(k)}: {_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, slice):
        return f"{_text(value.start)}:{_text(value.stop)}:{_text(value.step)}"
    if isinstance(value, str):
        return repr(value)
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))
