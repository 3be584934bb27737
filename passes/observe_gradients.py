"""Numbers stay as they are. Statistics of gradients leave the graph as the gradient of an extra input.

For every value of fp8compile/observe/selection.py seven numbers are taken (numerics/histogram.py): two bins, counts of
inf, NaN, zeros and subnormals, amax. They are put where the joint graph returns the gradient of the statistics input, so
that autograd delivers them (see fp8compile/observe/slot.py). Values of the forward get a row too, and a mark;
observe_forward fills it in once the graph is cut, so that counting has no say in what is saved.

Every gradient is counted. The number of rows is set before the graph is known, from the number of calls, and one call may be
hundreds of operations (an LSTM). Gradients beyond these rows are folded, all of one kind and dtype into one row (``REST``):
it says less about where, but hides nothing from a loss scaler.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fp8compile.fx.aot import BACKWARD, FORWARD, is_training, missing_gradient, return_at
from fp8compile.fx.graph import ROW, dtype_text, insertion_point_after, splice, storage_root
from fp8compile.fx.provenance import Origin, TensorInfo
from fp8compile.numerics.histogram import AMAX, partials, totals
from fp8compile.observe.records import REST
from fp8compile.observe.selection import ObservedValue, is_clipped, observable
from fp8compile.recipe.context import Context
from fp8compile.reporting.entries import OBSERVED, Notes, Observed, Skip

ALL_ROWS = "all"  # the mark of what the backward returns
TOO_MANY_VALUES = (
    "more values of the forward than rows in the statistics input; those first in the graph are observed"
)


def observe_gradients(graph: Graph, ctx: Context) -> Notes:
    """Let the graph return the statistics of what is worth watching in it."""
    if ctx.stats_inputs is None or not is_training(graph) or (at := _place(graph, ctx)) is None:
        return Notes()
    values, rest, surplus = _shared_out(observable(graph, ctx), ctx.stats_inputs.rows)
    order = {value: i for i, value in enumerate(values)}
    values = sorted(values, key=lambda v: "" if v.direction == FORWARD else _rows(v))
    limit = ctx.input_at(graph, ctx.stats_inputs.limit)
    if limit is not None and any(value.direction != FORWARD for value in (*values, *itertools.chain(*rest))):
        return_at(graph, at, _taken(graph, values, rest, ctx.stats_inputs.rows, limit))
    own = [_entry(value, row, order[value]) for row, value in enumerate(values)]
    return Notes(
        observed=(*own, *(_entry_of_rest(group, len(own) + i) for i, group in enumerate(rest))),
        skips=tuple(Skip(value.info, TOO_MANY_VALUES, OBSERVED) for value in surplus),
    )


def _shared_out(
    found: Sequence[ObservedValue], num_rows: int
) -> tuple[list[ObservedValue], list[list[ObservedValue]], list[ObservedValue]]:
    """The values with a row of their own; the other gradients, grouped by the row they share; the forward's other values."""
    if len(found) <= num_rows:
        return list(found), [], []
    shared = len({_kind(value) for value in found if value.direction == BACKWARD})
    assert shared <= num_rows, "slot.SPARE is more than kinds and dtypes there are"
    values, surplus = list(found[: num_rows - shared]), found[num_rows - shared :]
    gradients = sorted((value for value in surplus if value.direction == BACKWARD), key=_kind)
    rest = [list(group) for _, group in itertools.groupby(gradients, key=_kind)]
    return values, rest, [value for value in surplus if value.direction == FORWARD]


def _kind(value: ObservedValue) -> tuple[str, str]:
    return value.kind, dtype_text(value.node.meta["val"])


def _place(graph: Graph, ctx: Context) -> int | None:
    """The position of the statistics input's gradient among the graph's outputs, where None still stands."""
    assert ctx.stats_inputs is not None
    mine = ctx.input_at(graph, ctx.stats_inputs.statistics)
    return None if mine is None else missing_gradient(graph, mine)  # a node: the pass has run before


def _taken(
    graph: Graph, values: Sequence[ObservedValue], rest: Sequence[Sequence[ObservedValue]], num_rows: int, limit: Node
) -> Node:
    """``[num_rows, 7]``: zeros for the values of the forward, the statistics of the gradients, zeros for what is left."""
    of_forward = sum(value.direction == FORWARD for value in values)
    for row, value in enumerate(values[:of_forward]):
        value.node.meta[ROW] = row
    taken = _by_rows(graph, values[of_forward:], limit)
    taken += [_folded(graph, _by_rows(graph, sorted(group, key=_rows), limit)) for group in rest]

    def all_lines(*taken: Tensor) -> Tensor:
        return torch.nn.functional.pad(torch.cat(taken), (0, 0, of_forward, num_rows - len(values) - len(rest)))

    node: Node = splice(graph, all_lines, *taken, before=graph.output_node())
    node.meta[ROW] = ALL_ROWS
    return node


def _by_rows(graph: Graph, values: Sequence[ObservedValue], limit: Node) -> list[Node]:
    """The statistics of gradients; those with the same number of rows are taken together."""
    groups = [list(group) for _, group in itertools.groupby(values, key=_rows)]
    return [_together(graph, [value.node for value in group], limit) for group in groups]


def _folded(graph: Graph, several: Sequence[Node]) -> Node:
    """``[1, 7]``: all of these rows as one."""

    def folded(*several: Tensor) -> Tensor:
        stats = torch.cat(several)
        return torch.cat([stats[:, :AMAX].sum(0), stats[:, AMAX:].amax(0)]).unsqueeze(0)

    node: Node = splice(graph, folded, *several, before=graph.output_node())
    return node


def _together(graph: Graph, nodes: Sequence[Node], limit: Node) -> Node:
    """``[V, 7]`` for values with the same number of rows: partial sums where a value is made, and one total of them all."""
    parts = [_partials(node, limit) for node in nodes]
    sizes = [node.meta["val"].numel() for node in nodes]

    def together(*parts: Tensor) -> Tensor:
        return totals(parts, sizes)

    node: Node = splice(graph, together, *parts, before=graph.output_node())
    return node


def _partials(node: Node, limit: Node) -> Node:
    operands = (node, limit) if is_clipped(storage_root(node)) else (node,)
    parts: Node = splice(node.graph, _counted, *operands, before=insertion_point_after(node))
    return parts


def _counted(*value_and_limit: Tensor) -> Tensor:
    return partials(*value_and_limit)


def _rows(value: ObservedValue) -> str:
    """The key by which values are taken together: how many rows they have."""
    return str(value.node.meta["val"].shape[:-1].numel())


def _entry(value: ObservedValue, row: int, order: int) -> Observed:
    return Observed(value.info, value.kind, value.direction, row, order)


def _entry_of_rest(group: Sequence[ObservedValue], row: int) -> Observed:
    kind, dtype = _kind(group[0])
    info = TensorInfo.without_tensor(REST, Origin(REST, "", ""), dtype, sum(value.info.nbytes for value in group))
    return Observed(info, kind, BACKWARD, row, row, len(group))
