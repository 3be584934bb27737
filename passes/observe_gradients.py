"""Numbers stay as they are. Statistics of values and gradients leave the graph as the gradient of an extra input.

For every value of fp8compile/observable.py seven numbers are taken (numerics/histogram.py): two bins, counts of inf, NaN,
zeros and subnormals, amax. Those of the forward are kept for the backward, 56 bytes each; all of them together are put
where the joint graph returns the gradient of the statistics input, so autograd delivers them (see fp8compile/slot.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from fp8compile.context import Context
from fp8compile.flow import is_training
from fp8compile.graph import dtype_text, place_after, shape_text, splice
from fp8compile.numerics.histogram import statistics
from fp8compile.observable import FORWARD, Value, observable
from fp8compile.report import Notes, Observed, Skip

SURPLUS = "more values than lines in the statistics input; those first in the graph are observed"


def observe_gradients(graph: Graph, ctx: Context) -> Notes:
    """Let the graph return the statistics of what is worth watching in it."""
    if ctx.extra is None or not is_training(graph) or (at := _place(graph, ctx)) is None:
        return Notes()
    values = sorted(observable(graph, ctx), key=lambda value: value.direction != FORWARD)  # stable: else graph order
    values, surplus = values[: ctx.extra.lines], values[ctx.extra.lines :]
    if values:
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
    """``[lines, 7]``: the statistics of the values, then zeros."""
    taken = [splice(graph, statistics, value.node, before=place_after(value.node)) for value in values]
    forward = [stats for stats, value in zip(taken, values, strict=True) if value.direction == FORWARD]
    parts = list(taken[len(forward) :])
    if forward:
        order = {node: i for i, node in enumerate(graph.nodes)}
        last = max(forward, key=order.__getitem__)
        kept = splice(graph, _stacked, *forward, before=last.next)
        kept.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        parts.insert(0, kept)

    def all_lines(*parts: Tensor) -> Tensor:
        whole = torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
        return torch.nn.functional.pad(whole, (0, 0, 0, lines - whole.shape[0]))

    node: Node = splice(graph, all_lines, *parts, before=graph.output_node())
    return node


def _stacked(*stats: Tensor) -> Tensor:
    return torch.stack(stats)


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
