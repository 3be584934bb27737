"""Numbers stay as they are. The largest magnitudes of the forward's values are saved for backward, which returns them.

observe_gradients has marked the values and numbered their rows. The amax of each value is taken in groups, as encode_saved
takes it, so that both share one reduction; an inf or a NaN shows in the amax. All rows are saved in one tensor of 56 bytes a
row, and are added to the statistics that the backward returns anyway.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.fx import Node

from fp8compile.fx.graph import ROW, insertion_point_after, is_tensor, memory_order, numel, splice
from fp8compile.fx.ops import contracts, opname
from fp8compile.fx.partition import PartitionedGraph
from fp8compile.numerics.histogram import flags
from fp8compile.passes.observe_gradients import ALL_ROWS
from fp8compile.recipe.context import Context
from fp8compile.reporting.entries import Notes

GROUP = 128


def observe_forward(split: PartitionedGraph, ctx: Context) -> Notes:
    """Take the statistics of every marked value of the forward and let the backward return them."""
    marked = {node.meta[ROW]: node for node in split.fw.graph.nodes if isinstance(node.meta.get(ROW), int)}
    returned = next((n for n in split.bw.graph.nodes if n.meta.get(ROW) == ALL_ROWS), None)
    if not marked or returned is None:
        return Notes()
    for node in marked.values():
        del node.meta[ROW]  # so that a second run finds nothing to do
    graph = split.fw.graph
    amaxes = {
        row: splice(graph, _by_row if _is_made_by_row(node) else _by_group, node, before=insertion_point_after(node))
        for row, node in marked.items()
    }
    by_groups = sorted(amaxes, key=lambda row: str(amaxes[row].meta["val"].numel()))
    taken = [amaxes[row] for row in by_groups]
    dtypes = [marked[row].meta["val"].dtype for row in by_groups]

    def counts(*amaxes: Tensor) -> Tensor:
        largest: list[Tensor] = []
        for _, group in itertools.groupby(amaxes, key=lambda each: str(each.numel())):
            largest += torch.stack([each.reshape(-1) for each in group]).amax(-1).unbind()
        rows = [flags(amax, dtype) for amax, dtype in zip(largest, dtypes, strict=True)]
        by_index = dict(zip(by_groups, rows, strict=True))
        return torch.stack([by_index.get(i, torch.zeros_like(rows[0])) for i in range(max(by_groups) + 1)])

    def with_forward(backward: Tensor, forward: Tensor) -> Tensor:
        return backward + torch.nn.functional.pad(forward, (0, 0, 0, backward.shape[0] - forward.shape[0]))

    made = splice(graph, counts, *taken, before=graph.output_node())
    out = split.bw.graph.output_node()
    whole = splice(split.bw.graph, with_forward, returned, split.keep(made, "statistics"), before=out)
    out.replace_input_with(returned, whole)
    return Notes()


def _by_group(x: Tensor) -> Tensor:
    """Largest magnitudes of groups of 128, in memory order, or of rows where groups do not fit. NaN where a value is NaN."""
    if not x.dim() or not x.numel():
        return x.abs().sum()
    order = memory_order(x)
    x = x if order is None else x.permute(order)
    size = x.shape[-1]
    if isinstance(size, int) and size % GROUP == 0:
        x = x.reshape(*x.shape[:-1], size // GROUP, GROUP)
    return x.abs().amax(-1)


def _by_row(x: Tensor) -> Tensor:
    """Largest magnitudes along the last dimension. NaN where a value is NaN."""
    return x.abs().amax(-1)


def _is_made_by_row(node: Node, hops: int = 8) -> bool:
    """Whether a value is a pointwise function of a reduction along rows, as a norm's result is: one kernel with it."""
    while hops and node.op == "call_function" and not contracts(node):
        if opname(node) in ("mean", "sum", "var_mean", "amax"):
            return True
        smaller = [n for n in node.all_input_nodes if is_tensor(n) and n.op != "placeholder"]
        node, hops = min(smaller, key=lambda n: numel(n.meta["val"]), default=node), hops - 1
    return False
