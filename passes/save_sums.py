"""Numbers stay as they are but for one rounding, to a value's own dtype. A sum is saved instead of what was added to get it.

    x = x0 + a      a is saved; x0 is there anyway, as a layer's input is; a norm reads x, and the next residual does

a and x take the same bytes, so the min-cut takes either. With a saved, each kernel of the backward that needs x reads two
tensors, and so does each kernel of the forward. With x saved, it is stored once and read by itself.

Only in graphs with FP8 linears: storage alone leaves the forward as plain Inductor computes it, to the bit.

Left as they are: tensors that the backward needs for something else too, sums that broadcast or change the dtype, sums that
the forward itself reads once, and what the caller has anyway.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import Node

from fp8compile.analysis.recomputed import recomputed
from fp8compile.fx.graph import ENCODING, nbytes, storage_root
from fp8compile.fx.ops import RESHAPES
from fp8compile.fx.partition import PartitionedGraph, SavedTensor
from fp8compile.recipe.context import Context
from fp8compile.reporting.entries import Notes

aten = torch.ops.aten


def save_sums(split: PartitionedGraph, ctx: Context) -> Notes:
    """Save sums instead of summands, where that takes no more bytes."""
    has_codes = any(ENCODING in node.meta for node in split.fw.graph.nodes)
    same = recomputed(split) if has_codes else {}
    for edge in list(split.edges) if has_codes else ():
        if edge.is_tensor and not split.caller_owns(storage_root(edge.forward)):
            _save_the_sum(split, edge, same)
    return Notes()


def _save_the_sum(split: PartitionedGraph, edge: SavedTensor, same: Mapping[Node, Node]) -> None:
    *way, late = _to_the_sum(edge.backward)
    early = same.get(late) if late.target is aten.add.Tensor and len(late.all_input_nodes) == 2 else None
    if early is None or len(early.users) < 2 or nbytes(early.meta["val"]) > nbytes(edge.forward.meta["val"]):
        return
    used = split.placeholder(edge, early)
    late.replace_all_uses_with(used)
    for node in (late, *reversed(way)):
        split.bw.graph.erase_node(node)
    split.replace(edge, (early, used))


def _to_the_sum(value: Node) -> list[Node]:
    """The views and multiples, each the only reader of the one before, that lead from a value to its only reader, which
    comes last."""
    way: list[Node] = []
    while len(value.users) == 1:
        value = next(iter(value.users))
        way.append(value)
        if value.target not in RESHAPES and not _is_multiple(value):
            break
    return way or [value]


def _is_multiple(node: Node) -> bool:
    """Whether a node is a value times a number, as the factor of a sum is (``spell_out_alpha``)."""
    return node.target is aten.mul.Tensor and sum(isinstance(n, Node) for n in node.args) == 1
