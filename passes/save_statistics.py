"""Numbers stay as they are. A row's statistic that the backward would compute again is saved, where the row is codes for it.

    s = rsqrt(mean(x * x) + eps);   y = x s       in a checkpointed region x is saved, and s and y are computed again

Computed again from codes of x, s would divide by a number with a code's error, so x would stay exact. Saved, in a 256th of
a row of 512 numbers of 16 bits, it leaves y linear in x. The region starts from a byte an element. Saved with it are the
scales of what FP8 linears in the region encode: the backward has the forward's, and takes no amax.

Left as they are: statistics of values that must stay exact all the same, or that the caller has anyway; those that take more
than 1/16 of what they are made from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from torch.fx import Node

from fp8compile.analysis.recomputed import recomputed
from fp8compile.analysis.sensitivity import Sensitivity
from fp8compile.analysis.statistics import is_statistic
from fp8compile.fx.graph import is_tensor, nbytes
from fp8compile.fx.ops import is_pointwise
from fp8compile.fx.partition import PartitionedGraph, SavedTensor
from fp8compile.numerics import E4M3, INT8
from fp8compile.recipe.context import Context
from fp8compile.reporting.entries import Notes

SMALL = 16  # times fewer bytes than what it is made from


def save_statistics(split: PartitionedGraph, ctx: Context) -> Notes:
    """Save the statistics that the backward makes of saved values, but for those of which nothing is a code even so."""
    found = _statistics_of_saved(split) if ctx.recipe.rounds_saved else {}
    saved = {late: split.save(late, early, edges[0]) for (late, early), edges in found.items()}
    exact = _exact(split, {edge for edges in found.values() for edge in edges}) if found else set()
    for (late, _), edges in found.items():
        if exact.issuperset(edges):
            split.compute_again(saved[late], late)
    split.drop_unread()
    return Notes()


def _statistics_of_saved(split: PartitionedGraph) -> dict[tuple[Node, Node], tuple[SavedTensor, ...]]:
    """Statistics that the backward computes, with the same of the forward, and the saved activations they are made from."""
    made_of = _made_of(split)
    found = {
        (late, early): edges
        for late, early in recomputed(split).items()
        if late.op == "call_function" and is_tensor(late) and is_statistic(late) and _is_read_as_one(late)
        if (edges := tuple(edge for edge in made_of[late] if _is_small(early, edge)))
    }
    kept = {late for late, _ in found}
    return {(late, early): edges for (late, early), edges in found.items() if not _follows_from(late, kept)}


def _made_of(split: PartitionedGraph) -> Mapping[Node, frozenset[SavedTensor]]:
    """For each value of the backward, the saved activations that it is computed from."""
    given = {e.backward: e for e in split.edges if split.may_be_codes(e) and not is_statistic(e.forward)}
    found: dict[Node, frozenset[SavedTensor]] = {}
    for node in split.bw.graph.nodes:
        of_inputs = frozenset().union(*(found[n] for n in node.all_input_nodes))
        found[node] = of_inputs | {given[node]} if node in given else of_inputs
    return found


def _is_read_as_one(late: Node) -> bool:
    """Whether a value that is no statistic itself is made from it: the last of a chain of them."""
    return any(is_tensor(user) and not is_statistic(user) for user in late.users)


def _follows_from(late: Node, kept: Set[Node]) -> bool:
    """Whether a statistic is a function of others that are saved, element by element: a scale's reciprocal, for example."""
    return is_pointwise(late) and all(node in kept for node in late.all_input_nodes)


def _is_small(early: Node, edge: SavedTensor) -> bool:
    return SMALL * nbytes(early.meta["val"]) <= nbytes(edge.forward.meta["val"])


def _exact(split: PartitionedGraph, edges: Iterable[SavedTensor]) -> set[SavedTensor]:
    """Those to which the gradients answer with errors that nothing bounds, in either format of a byte."""
    judge = Sensitivity(split)
    return {edge for edge in edges if all(judge.reason_to_stay_exact(edge.backward, fmt) for fmt in (INT8, E4M3))}
