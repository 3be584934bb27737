"""Numbers stay as they are. Values that the backward can make from what is saved anyway are not saved.

Upstream's cut keeps a norm's output beside its input, silu(gate) * up beside gate and up, and the attention output twice,
as a 4-D tensor and as the 2-D view that feeds the output projection. Each is a view or a pointwise expression of tensors
that are saved, so the backward repeats it where it is first needed; one storage, one copy. Where time counts
(``fp8compile/saved/allowance.py``) it is done where it is worth it: what a matmul reads has to be written again.

What takes less is saved instead: of a value that was cast to a wider dtype what it was before, of a mask of all pairs of
positions the numbers of each position (where they take a 16th of it at most).

Legality: only the operations in CHEAP (``fp8compile/fx/cheap.py``) are repeated. All of them are deterministic, none is a
reduction or a matmul. Their operands are values that reach the backward anyway (saved tensors, parameters, the caller's data
unless the forward overwrites it), constants, or, failing that, the FP8 codes that a matmul's operand was decoded from; these
codes are then saved instead of it. No value is made from one that is itself recomputed: a residual stream would be rebuilt
from its start, step by step, with all of it alive at once.

    x_g = x[token]      tokens [T, C], gathered [k T, C] for the k experts of each: x and token are kept, x_g is k times x

Rows that were gathered are gathered again: a gather reads what is saved of each token and computes nothing, so its numbers
are those of the forward, or the codes' where x is codes. What such a chain has in common with the backward (a router reads
the same norm's output) is made once. Codes of such rows, for the wgrad of experts in FP8 (linears/expert_matmuls.py), are
made again with them: their amaxes are the one reduction repeated.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch.fx import Node

from fp8compile.fx.cheap import GATHER, is_cheap
from fp8compile.fx.graph import ENCODING, EXACT, is_tensor, nbytes, storage_root
from fp8compile.fx.ops import SIXTEEN_BIT
from fp8compile.fx.partition import PartitionedGraph, SavedTensor
from fp8compile.recipe.context import Context
from fp8compile.reporting.entries import Notes, Recomputed
from fp8compile.saved.allowance import Allowance, counts_time

prims = torch.ops.prims

SMALL = 16  # times fewer bytes than what is made of it
LONGEST_CHAIN = 64  # nodes repeated for one value: norms and gates take under 20, GELU by erf under 12


def recompute_kept(split: PartitionedGraph, ctx: Context) -> Notes:
    """Drop every saved tensor that views and pointwise operations make from the others."""
    notes, codes = Notes(), _codes(split)
    values = (n for n in split.fw.graph.nodes if n.op == "call_function" and is_tensor(n))
    by_bytes = sorted(((nbytes(n.meta["val"]), at, n) for at, n in enumerate(values)))

    def chain_of(edge: SavedTensor) -> list[Node] | None:
        chains = (_chain(edge.forward, given, split) for given in _ways(split, edge, codes, by_bytes))
        return next(filter(None, chains), None)

    worth = _worth_making(split, ctx, chain_of)
    for edge in _largest_first(split):  # first what is made of nothing that is saved
        if edge.backward in worth and (chain := _chain(edge.forward, set(), split)):
            notes += _drop(split, edge, chain, worth[edge.backward])
    fixed: set[Node] = set()  # what recomputed values are made from: these must stay
    for edge in _largest_first(split):
        if edge.forward in fixed or edge.backward not in worth:
            continue
        if chain := chain_of(edge):
            fixed.update(_operands(chain))
            notes += _drop(split, edge, chain, worth[edge.backward])
    return notes


def _worth_making(
    split: PartitionedGraph, ctx: Context, chain_of: Callable[[SavedTensor], list[Node] | None]
) -> Mapping[Node, float]:
    """What may be dropped, by the backward's inputs, with its microseconds: everything, at none, unless time counts."""
    candidates = _largest_first(split)
    if not counts_time(ctx, [split.fw.graph, split.bw.graph]):
        return dict.fromkeys((edge.backward for edge in candidates), 0.0)
    chains = {e.backward: _chain(e.forward, set(), split) or chain_of(e) for e in candidates}
    return Allowance(split, ctx).worth_making({node: chain for node, chain in chains.items() if chain})


def _largest_first(split: PartitionedGraph) -> list[SavedTensor]:
    """Candidates; among equals, later ones first, so that an output is dropped and its input kept, and views before roots."""
    position = {node: i for i, node in enumerate(split.fw.graph.nodes)}
    candidates = [
        e for e in split.edges if e.is_tensor and is_cheap(e.forward) and EXACT not in storage_root(e.forward).meta
    ]
    return sorted(candidates, key=lambda e: (-nbytes(e.forward.meta["val"]), -position[e.forward]))


def _ways(
    split: PartitionedGraph, edge: SavedTensor, codes: set[Node], by_bytes: Sequence[tuple[int, int, Node]]
) -> Iterator[set[Node]]:
    """What a value may be made from, from the best on: what is saved anyway, else codes too, else what takes less."""
    given = {e.forward for e in split.edges if e is not edge and e.is_tensor}
    yield given
    yield (given | codes) - {edge.forward}
    yield given | _narrower(edge) | _far_smaller(edge, by_bytes)


def _chain(value: Node, given: set[Node], split: PartitionedGraph) -> list[Node] | None:
    """The cheap nodes that make ``value`` from given ones, in graph order; None if there is no such chain."""
    chain: set[Node] = set()
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if node in chain or node in given or split.costs_nothing_to_keep(node):
            continue
        if not is_cheap(node) or len(chain) == LONGEST_CHAIN:
            return None
        chain.add(node)
        waiting.extend(node.all_input_nodes)
    return [n for n in split.fw.graph.nodes if n in chain]


def _codes(split: PartitionedGraph) -> set[Node]:
    """Codes and scales that the forward makes for matmuls: keeping these takes less than keeping the decoded value."""
    return {n for n in split.fw.graph.nodes if ENCODING in n.meta}


def _narrower(edge: SavedTensor) -> set[Node]:
    """What a value was before a cast that added no bits to it."""
    if edge.forward.target is not prims.convert_element_type.default:
        return set()
    (source,) = edge.forward.all_input_nodes
    before, after = source.meta["val"].dtype, edge.forward.meta["val"].dtype
    return {source} if before in SIXTEEN_BIT and after is torch.float32 else set()


def _far_smaller(edge: SavedTensor, by_bytes: Sequence[tuple[int, int, Node]]) -> set[Node]:
    """Values that take so few bytes beside one that they may be saved for it; all are given in the order of their bytes."""
    most = nbytes(edge.forward.meta["val"]) // SMALL
    return {node for _, _, node in by_bytes[: bisect.bisect_left(by_bytes, (most + 1,))]}


def _operands(chain: list[Node]) -> list[Node]:
    """What a chain is made of."""
    return list(dict.fromkeys(n for node in chain for n in node.all_input_nodes if n not in chain))


def _drop(split: PartitionedGraph, edge: SavedTensor, chain: list[Node], us: float) -> Notes:
    """Copy ``chain`` into the backward, before the first use; operands that were not saved yet are saved now. It is predicted
    to take so many microseconds."""
    split.to_spend_us -= us
    operands = _operands(chain)
    given = {e.forward: e.backward for e in split.edges}
    new = {made: split.placeholder(edge, made) for made in operands if made not in given}
    copied, first = given | new, edge.in_order[0]
    shares = any(node.target is GATHER for node in chain)
    for node in chain:
        there = _made_already(node, copied, first) if shares else None
        with split.bw.graph.inserting_before(first):
            copied[node] = there or split.bw.graph.node_copy(node, lambda n: copied[n])
    edge.backward.replace_all_uses_with(copied[edge.forward])
    split.replace(edge, *new.items())
    if split.caller_owns(storage_root(edge.forward)):
        return Notes()
    return Notes(recomputed=(Recomputed(edge.info, tuple(n.name for n in operands)),))


def _made_already(node: Node, copied: Mapping[Node, Node], before: Node) -> Node | None:
    """What the backward has of ``node`` on the same operands, moved to where it is needed if it stands later."""
    wanted = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: copied[n])
    users = copied[node.all_input_nodes[0]].users if node.all_input_nodes else ()
    there = next((u for u in users if u.target is node.target and (u.args, u.kwargs) == wanted), None)
    if there is not None and there > before:
        before.prepend(there)
    return there
