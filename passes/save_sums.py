"""Numbers stay as they are but for one rounding, to a value's own dtype. A sum is saved instead of what was added to get it.

    x = x0 + a      a is saved; x0 is there anyway, as a layer's input is; a norm reads x, and the next residual does

a and x take the same bytes, so the min-cut takes either. With a saved, each kernel of the backward that needs x reads two
tensors, and so does each kernel of the forward. With x saved, it is stored once and read by itself.

Only in graphs with FP8 linears: storage alone leaves the forward as plain Inductor computes it, to the bit.

Left as they are: tensors that the backward needs for something else too, sums that broadcast or change the dtype, sums that
the forward itself reads once, and what the caller has anyway.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from fp8compile.fx.graph import ENCODING, nbytes, storage_root
from fp8compile.fx.ops import RESHAPES
from fp8compile.fx.partition import PartitionedGraph, SavedTensor
from fp8compile.recipe.context import Context
from fp8compile.reporting.entries import Notes

aten = torch.ops.aten


def save_sums(split: PartitionedGraph, ctx: Context) -> Notes:
    """Save sums instead of summands, where that takes no more bytes."""
    has_codes = any(ENCODING in node.meta for node in split.fw.graph.nodes)
    for edge in list(split.edges) if has_codes else ():
        if edge.is_tensor and not split.caller_owns(storage_root(edge.forward)):
            _save_the_sum(split, edge)
    return Notes()


def _save_the_sum(split: PartitionedGraph, edge: SavedTensor) -> None:
    *views, late = _to_the_sum(edge.backward)
    early = _same_in_forward(split, edge, views, late)
    if early is None or len(early.users) < 2 or nbytes(early.meta["val"]) > nbytes(edge.forward.meta["val"]):
        return
    used = split.placeholder(edge, early)
    late.replace_all_uses_with(used)
    for node in (late, *reversed(views)):
        split.bw.graph.erase_node(node)
    split.replace(edge, (early, used))


def _to_the_sum(value: Node) -> list[Node]:
    """The views, each the only reader of the one before, that lead from a value to its only reader, which comes last."""
    way: list[Node] = []
    while len(value.users) == 1:
        value = next(iter(value.users))
        way.append(value)
        if value.target not in RESHAPES:
            break
    return way or [value]


def _same_in_forward(split: PartitionedGraph, edge: SavedTensor, views: list[Node], late: Node) -> Node | None:
    """The sum that the forward makes of the saved value and of another that reaches the backward; None if there is none."""
    if late.target is not aten.add.Tensor or len(late.all_input_nodes) != 2:
        return None
    early = {e.backward: e.forward for e in split.edges if e.is_tensor}
    for node in (*views, late):
        operands = [early.get(n) for n in node.all_input_nodes]
        readers = operands[0].users if operands[0] is not None else ()
        found = (n for n in readers if n.target is node.target and n.all_input_nodes == operands)
        same = next((n for n in found if (_shape(n), n.kwargs) == (_shape(node), node.kwargs)), None)
        if same is None:
            return None
        early[node] = same
    return early[late]


def _shape(node: Node) -> tuple[object, ...]:
    value = node.meta["val"]
    return *map(str, value.shape), value.dtype
