"""Numbers stay as they are. Values that the backward can make from what is saved anyway are not saved.

Upstream's cut keeps a norm's output beside its input, silu(gate) * up beside gate and up, and the attention output twice,
as a 4-D tensor and as the 2-D view that feeds the output projection. Each is a view or a pointwise expression of tensors
that are saved, so the backward repeats it where it is first needed; one storage, one copy.

What takes less is saved instead: of a value that was cast to a wider dtype what it was before, of a mask of all pairs of
positions the numbers of each position (where they take a 16th of it at most).

Legality: only the operations in CHEAP are repeated. All of them are deterministic, none is a reduction or a matmul. Their
operands are values that reach the backward anyway (saved tensors, parameters, the caller's data unless the forward overwrites
it), constants, or, failing that, the FP8 codes that a matmul's operand was decoded from; these codes are then saved instead
of it. No value is made from one that is itself recomputed: a residual stream would be rebuilt from its start, step by step,
with all of it alive at once.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from fp8compile.fx.graph import ENCODING, EXACT, is_tensor, nbytes, storage_root
from fp8compile.fx.ops import SEEDED, VIEWS
from fp8compile.fx.partition import PartitionedGraph, SavedTensor
from fp8compile.recipe.context import Context
from fp8compile.reporting.entries import Notes, Recomputed

aten, prims = torch.ops.aten, torch.ops.prims

SMALL = 16  # times fewer bytes than what is made of it
LONGEST_CHAIN = 64  # nodes repeated for one value: norms and gates take under 20, GELU by erf under 12

CHEAP = (
    VIEWS
    | SEEDED
    | {
        aten.add.Tensor,
        aten.sub.Tensor,
        aten.mul.Tensor,
        aten.div.Tensor,
        aten.neg.default,
        aten.abs.default,
        aten.exp.default,
        aten.erf.default,
        aten.tanh.default,
        aten.sigmoid.default,
        aten.relu.default,
        aten.sqrt.default,
        aten.rsqrt.default,
        aten.reciprocal.default,
        aten.pow.Tensor_Scalar,
        aten.clamp.default,
        aten.clamp_min.default,
        aten.clamp_max.default,
        aten.maximum.default,
        aten.minimum.default,
        aten.where.self,
        *(
            getattr(getattr(aten, name), kind)
            for name in ("eq", "ne", "gt", "ge", "lt", "le")
            for kind in ("Scalar", "Tensor")
        ),
        aten.logical_not.default,
        aten.logical_and.default,
        aten.logical_or.default,
        aten.bitwise_not.default,
        aten.bitwise_and.Tensor,
        aten.bitwise_or.Tensor,
        aten.clone.default,
        aten.cat.default,
        aten.full.default,
        aten.scalar_tensor.default,
        aten.log.default,
        aten.log1p.default,
        prims.convert_element_type.default,
    }
)


def recompute_kept(split: PartitionedGraph, ctx: Context) -> Notes:
    """Drop every saved tensor that views and pointwise operations make from the others."""
    notes, codes = Notes(), _codes(split)
    for edge in _largest_first(split):  # first what is made of nothing that is saved
        if chain := _chain(edge.forward, set(), split):
            notes += _drop(split, edge, chain)
    fixed: set[Node] = set()  # what recomputed values are made from: these must stay
    for edge in _largest_first(split):
        if edge.forward in fixed:
            continue
        given = {e.forward for e in split.edges if e is not edge and e.is_tensor}
        or_codes = (given | codes) - {edge.forward}
        or_less = given | _narrower(edge) | _far_smaller(edge)
        chains = (_chain(edge.forward, of, split) for of in (given, or_codes, or_less))
        if chain := next(filter(None, chains), None):
            fixed.update(_operands(chain))
            notes += _drop(split, edge, chain)
    return notes


def _largest_first(split: PartitionedGraph) -> list[SavedTensor]:
    """Candidates; among equals, later ones first, so that an output is dropped and its input kept, and views before roots."""
    position = {node: i for i, node in enumerate(split.fw.graph.nodes)}
    candidates = [
        e
        for e in split.edges
        if e.is_tensor and e.forward.op == "call_function" and e.forward.target in CHEAP
        if EXACT not in storage_root(e.forward).meta
    ]
    return sorted(candidates, key=lambda e: (-nbytes(e.forward.meta["val"]), -position[e.forward]))


def _chain(value: Node, given: set[Node], split: PartitionedGraph) -> list[Node] | None:
    """The cheap nodes that make ``value`` from given ones, in graph order; None if there is no such chain."""
    chain: set[Node] = set()
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if node in chain or node in given or split.costs_nothing_to_keep(node):
            continue
        if node.op != "call_function" or node.target not in CHEAP or len(chain) == LONGEST_CHAIN:
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
    return {source} if torch.promote_types(before, after) is after and before.itemsize < after.itemsize else set()


def _far_smaller(edge: SavedTensor) -> set[Node]:
    """Values that take so few bytes beside one that they may be saved for it."""
    most = nbytes(edge.forward.meta["val"]) // SMALL
    values = edge.forward.graph.nodes
    return {n for n in values if n.op == "call_function" and is_tensor(n) and nbytes(n.meta["val"]) <= most}


def _operands(chain: list[Node]) -> list[Node]:
    """What a chain is made of."""
    return list(dict.fromkeys(n for node in chain for n in node.all_input_nodes if n not in chain))


def _drop(split: PartitionedGraph, edge: SavedTensor, chain: list[Node]) -> Notes:
    """Copy ``chain`` into the backward, before the first use; operands that were not saved yet are saved now."""
    operands = _operands(chain)
    given = {e.forward: e.backward for e in split.edges}
    new = {made: split.placeholder(edge, made) for made in operands if made not in given}
    copied = given | new
    with split.bw.graph.inserting_before(edge.in_order[0]):
        for node in chain:
            copied[node] = split.bw.graph.node_copy(node, lambda n: copied[n])
    edge.backward.replace_all_uses_with(copied[edge.forward])
    split.replace(edge, *new.items())
    if split.caller_owns(storage_root(edge.forward)):
        return Notes()
    return Notes(recomputed=(Recomputed(edge.info, tuple(n.name for n in operands)),))
