"""Numbers stay as they are. A softmax is saved instead of its logits, where the logits would stay exact.

    p = softmax(z)      dz = p (dp - sum(p dp)) reads p alone, and so does the product of p with the values

Both have as many elements, so the cut takes either. But the backward exponentiates logits: an error of one would become a
factor of its probability. What is read linearly may be codes, whose sums are made 1 again (``numerics/unit_sums.py``).

Left as they are: logits that the backward reads for something else too; those that are codes themselves; a softmax that no
matmul reads, such as a router's, which is small beside its tokens; what is not proven to be a softmax
(``fp8compile/analysis/softmax.py``), and what may not be codes either.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Set

from torch.fx import Node

from fp8compile.analysis.recomputed import Same, recomputed
from fp8compile.analysis.softmax import softmax_dim
from fp8compile.fx.aot import computed_from_gradients
from fp8compile.fx.graph import computed_from_any, is_tensor, numel
from fp8compile.fx.ops import is_matmul
from fp8compile.fx.partition import PartitionedGraph, SavedTensor
from fp8compile.recipe.context import Context
from fp8compile.reporting.entries import Notes
from fp8compile.saved.judge import Judge, Unencoded


def save_softmax(split: PartitionedGraph, ctx: Context) -> Notes:
    """Save what the backward makes of saved logits, where nothing else of them is read."""
    found = _softmaxes(split) if ctx.recipe.rounds_saved else {}
    exact = set(_exact(split, found, ctx))
    saved = {edge: split.save(*found[edge], edge) for edge in found if edge in exact}
    still = set(_exact(split, saved.values(), ctx))
    for edge, instead in saved.items():
        if instead in still:
            split.compute_again(instead, found[edge][0])
    if saved:
        split.drop_unread()
    return Notes()


def _exact(split: PartitionedGraph, edges: Collection[SavedTensor], ctx: Context) -> Iterator[SavedTensor]:
    """Those that would stay as they are."""
    judge = Judge(split, ctx) if edges else None
    return (edge for edge in edges if judge and isinstance(judge.decide(edge), Unencoded))


def _softmaxes(split: PartitionedGraph) -> dict[SavedTensor, tuple[Node, Node]]:
    """Saved logits with the last form of their softmax, in the backward and in the forward."""
    same = recomputed(split)
    values = ((late, early) for late, early in same.items() if late.op == "call_function" and is_tensor(late))
    softmaxes = [(late, early) for late, early in values if softmax_dim(early) is not None]
    gradients = computed_from_gradients(split.bw.graph) if softmaxes else set()
    found: dict[SavedTensor, tuple[Node, Node]] = {}
    for late, early in softmaxes:
        if _is_multiplied(late, gradients):
            made_of = (edge for edge in split.edges if split.may_be_codes(edge) and _serves(edge, late, same))
            found |= {edge: (late, early) for edge in made_of}
    return found


def _is_multiplied(late: Node, gradients: Set[Node]) -> bool:
    """Whether a matmul reads a value, or what the backward makes of it without a gradient: views, drop-outs."""
    made = (node for node in computed_from_any([late]) if node not in gradients)
    return any(is_matmul(user) for node in made for user in node.users)


def _serves(edge: SavedTensor, late: Node, same: Same) -> bool:
    """Whether a saved value of as many elements is read to make ``late`` alone."""
    if numel(late.meta["val"]) != numel(edge.forward.meta["val"]) or late not in computed_from_any([edge.backward]):
        return False
    return all(node.users and node in same for node in computed_from_any([edge.backward], but=late))
