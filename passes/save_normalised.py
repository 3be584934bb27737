"""Numbers stay as they are but for one rounding, to a value's own dtype. What a norm reads is saved, not what it is made of.

Where no linear is in FP8 the forward's results stay as they are to the bit: only the codes of what is added are stored.

    x = x0 + a;   y = norm(x)        x0 and a are saved, and the backward adds them up again; or x is saved

An error of x counts beside x's deviation, and nothing bounds the errors of codes of x0 and a beside that. So either x0 and a
stay exact, or x is saved itself. That takes its codes, and spares what only x was made of: here a, so it takes nothing.

Left as they are: values made of what the caller owns; values where exact operands take no more bytes; products with a
parameter, since the gradient goes on through the same factors, and in the norm's backward the large elements all but cancel;
residual sums of a checkpointed block, which may be made from codes (``fp8compile/analysis/sensitivity/residual.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from fp8compile.analysis.frozen_norms import all_norms_of
from fp8compile.analysis.norms import itself
from fp8compile.analysis.ranges.matching import packet
from fp8compile.analysis.recomputed import recomputed
from fp8compile.analysis.sensitivity import Sensitivity
from fp8compile.fx.checkpointed import has_regions
from fp8compile.fx.graph import (
    COPY_OF,
    ENCODING,
    computed_from_any,
    insertion_point_after,
    is_tensor,
    nbytes,
    numel,
)
from fp8compile.fx.partition import PartitionedGraph, SavedTensor
from fp8compile.recipe.context import Context
from fp8compile.reporting.entries import Notes

aten = torch.ops.aten


def save_normalised(split: PartitionedGraph, ctx: Context) -> Notes:
    """Save values that are normalised instead of what they are made of, where that takes fewer bytes."""
    if not ctx.recipe.rounds_saved:
        return Notes()
    norms = all_norms_of(split.fw.graph)
    judge = Sensitivity(split) if has_regions(split.fw.graph) else None  # of residual sums, which regions make again
    has_codes = any(ENCODING in node.meta for node in split.fw.graph.nodes)
    for late, early in recomputed(split).items():
        if late.op != "call_function" or early not in norms or _is_scaled(early):
            continue
        made_of = _made_of(split, late)
        if made_of and judge and all(judge.is_residual_sum(late, edge.backward) for edge in made_of):
            continue
        spared = [edge for edge in made_of if _is_read_for(edge.backward, late)]
        if _takes_fewer_bytes(early, made_of, spared):
            split.save(late, early if has_codes or _is_stored_whole(early) else _copied(early), made_of[0])
            split.drop_unread()
    return Notes()


def _takes_fewer_bytes(early: Node, made_of: Sequence[SavedTensor], spared: Sequence[SavedTensor]) -> bool:
    """Whether codes of a value take fewer than exact values of what it is made of, without those that serve it alone."""
    exact = sum(nbytes(edge.forward.meta["val"]) - _codes(edge.forward) for edge in made_of)
    return bool(made_of) and _codes(early) - sum(_codes(edge.forward) for edge in spared) < exact


def _is_stored_whole(early: Node) -> bool:
    """Whether storing a value cannot change what reads it: it is a sum in FP32, in registers as in memory. A product may be
    added to something in one rounding where it is not stored."""
    value = itself(early)
    return packet(value) is aten.add and value.meta["val"].dtype == torch.float32 == early.meta["val"].dtype


def _copied(early: Node) -> Node:
    """The value once more, to be saved: one more reader of the value itself might make Inductor store and so round it."""
    graph = early.graph
    with graph.inserting_before(insertion_point_after(early)):
        made = graph.node_copy(early, lambda n: n)
    made.meta[COPY_OF] = early
    return made


def _made_of(split: PartitionedGraph, late: Node) -> list[SavedTensor]:
    """What of a value of the backward may be codes: of what is saved, what makes it."""
    inputs = _inputs_of(late)
    return [edge for edge in split.edges if edge.backward in inputs and split.may_be_codes(edge)]


def _codes(node: Node) -> int:
    return numel(node.meta["val"])


def _is_scaled(early: Node) -> bool:
    """Whether a value is a product with fewer factors than it has elements."""
    node = itself(early)
    if packet(node) not in (aten.mul, aten.div):
        return False
    factors = [n for n in node.all_input_nodes if is_tensor(n)]
    return any(1 < numel(n.meta["val"]) < numel(node.meta["val"]) for n in factors)


def _inputs_of(node: Node) -> set[Node]:
    """What a value of the backward is made of among its inputs of at least as many elements."""
    seen, waiting, least = {node}, [node], numel(node.meta["val"])
    while waiting:
        for parent in waiting.pop().all_input_nodes:
            if parent not in seen and is_tensor(parent) and numel(parent.meta["val"]) >= least:
                seen.add(parent)
                waiting.append(parent)
    return {n for n in seen if n.op == "placeholder"}


def _is_read_for(value: Node, late: Node) -> bool:
    """Whether all that reads a value serves to make ``late``: nothing is returned that is computed without that."""
    return all(node.users for node in computed_from_any([value], but=late))
