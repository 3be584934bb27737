"""Numbers stay as they are. Statistics of gradients leave the graph as the gradient of an extra input.

For every value of fp8compile/observable.py seven numbers are taken (numerics/histogram.py): two bins, counts of inf, NaN,
zeros and subnormals, amax. They are put where the joint graph returns the gradient of the statistics input, so that
autograd delivers them (see fp8compile/slot.py). Values of the forward get a line too, and a mark; observe_forward fills it
in once the graph is cut, so that counting has no say in what is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fp8compile.context import Context
from fp8compile.flow import is_training
from fp8compile.graph import LINE, dtype_text, place_after, shape_text, splice
from fp8compile.numerics.histogram import statistics
from fp8compile.observable import FORWARD, Value, observable
from fp8compile.report import Notes, Observed, Skip

ALL_LINES = "all"  # the mark of what the backward returns
SURPLUS = "more values than lines in the statistics input; those first in the graph are observed"


def observe_gradients(graph: Graph, ctx: Context) -> Notes:
    """Let the graph return the statistics of what is worth watching in it."""
    if ctx.extra is None or not is_training(graph) or (at := _place(graph, ctx)) is None:
        return Notes()
    values = sorted(observable(graph, ctx), key=lambda value: value.direction != FORWARD)  # stable: else graph order
    values, surplus = values[: ctx.extra.lines], values[ctx.extra.lines :]
    if any(value.direction != FORWARD for value in values):
        _return(graph, at, _taken(graph, values, ctx.extra.lines))
    return Notes(
        observed=tuple(_entry(value, row) for row, value in enumerate(values)),
        skips=tuple(_skip(value) for value in surplus),
    )


def _place(graph: Graph, ctx: Context) -> int | None:
    """The position among the graph's outputs of the statistics input's gradient, None so far."""
    assert ctx.extra is not None
    placeholders = graph.find_nodes(op="placeholder")
    inputs = [n for n in placeholders if "Tangent" not in type(n.meta.get("desc")).__name__]
    mine = ctx.input_at(graph, ctx.extra.statistics)
    outputs: Any = graph.output_node().args[0]
    if mine is None:
        return None
    at = len(outputs) - len(inputs) + inputs.index(mine)
    return at if outputs[at] is None else None  # else the pass has run before


def _taken(graph: Graph, values: Sequence[Value], lines: int) -> Node:
    """``[lines, 7]``: zeros for the values of the forward, the statistics of the gradients, zeros for what is left."""
    of_forward = sum(value.direction == FORWARD for value in values)
    for row, value in enumerate(values[:of_forward]):
        value.node.meta[LINE] = row
    taken = [splice(graph, statistics, v.node, before=place_after(v.node)) for v in values[of_forward:]]

    def all_lines(*taken: Tensor) -> Tensor:
        return torch.nn.functional.pad(torch.stack(taken), (0, 0, of_forward, lines - of_forward - len(taken)))

    node: Node = splice(graph, all_lines, *taken, before=graph.output_node())
    node.meta[LINE] = ALL_LINES
    return node


def _return(graph: Graph, at: int, node: Node) -> None:
    out = graph.output_node()
    outputs: Any = out.args[0]
    out.args = (type(outputs)([*outputs[:at], node, *outputs[at + 1 :]]),)


def _entry(value: Value, row: int) -> Observed:
    seen = value.node.meta["val"]
    return Observed(
        value.node.name, value.origin, shape_text(seen), dtype_text(seen), value.kind, value.direction, row
    )


def _skip(value: Value) -> Skip:
    seen = value.node.meta["val"]
    return Skip(value.node.name, value.origin, shape_text(seen), dtype_text(seen), 0, SURPLUS)
