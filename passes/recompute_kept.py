"""Numbers stay as they are. Values that the backward can make from what is saved anyway are not saved.

Upstream's cut keeps a norm's output beside its input, silu(gate) * up beside gate and up, and the attention output twice,
as a 4-D tensor and as the 2-D view that feeds the output projection. Each is a view or a pointwise expression of tensors
that are saved, so the backward repeats it where it is first needed; one storage, one copy.

Legality: only the operations in CHEAP are repeated. All of them are deterministic, none is a reduction or a matmul. Their
operands are values that reach the backward anyway (saved tensors, parameters, the caller's data unless the forward overwrites
it), constants, or, failing that, the FP8 codes that a matmul's operand was decoded from; these codes are then saved instead
of it. No value is made from one that is itself recomputed: a residual stream would be rebuilt from its start, step by step,
with all of it alive at once.

    x_g = x[token]      tokens [T, C], gathered [k T, C] for the k experts of each: x and token are kept, x_g is k times x

Rows that were gathered are gathered again: a gather reads what is saved of each token and computes nothing, so its numbers
are those of the forward, or the codes' where x is codes. A mask's gather has as many rows as it has ones, and stays. What
such a chain has in common with the backward (a router reads the same norm's output) is made once. Codes of such rows, for the
wgrad of experts in FP8 (encoding/expert_matmuls.py), are made again with them: their amaxes are the one reduction repeated.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

import torch
from torch.fx import Node

from fp8compile.fx.graph import AGAIN, ENCODING, EXACT, nbytes, storage_root
from fp8compile.fx.ops import SEEDED, VIEWS
from fp8compile.fx.partition import PartitionedGraph, SavedTensor
from fp8compile.recipe.context import Context
from fp8compile.reporting.entries import Notes, Recomputed

aten, prims = torch.ops.aten, torch.ops.prims

GATHER = aten.index.Tensor
LONGEST_CHAIN = 64  # nodes repeated for one value: norms and gates take under 20, GELU by erf under 12

CHEAP = VIEWS | {
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
    aten.gt.Scalar,
    aten.ge.Scalar,
    aten.lt.Scalar,
    aten.le.Scalar,
    aten.logical_not.default,
    aten.clone.default,
    aten.cat.default,
    aten.div.Tensor_mode,
    aten.full.default,
    GATHER,
    aten.scalar_tensor.default,
    aten.log.default,
    aten.log1p.default,
    prims.convert_element_type.default,
}


def recompute_kept(split: PartitionedGraph, ctx: Context) -> Notes:
    """Drop every saved tensor that views and pointwise operations make from the others."""
    notes = Notes()
    cheap = CHEAP | SEEDED if ctx.recipe.codegen == "inductor" else CHEAP
    codes = _codes(split)
    fixed: set[Node] = set()  # what recomputed values are made from: these must stay
    for edge in _largest_first(split, cheap):
        if edge.forward in fixed or EXACT in storage_root(edge.forward).meta:
            continue
        given = {e.forward for e in split.edges if e is not edge and e.is_tensor}
        or_codes = (given | codes) - {edge.forward}
        chain = _chain(edge.forward, given, split, cheap) or _chain(edge.forward, or_codes, split, cheap)
        if not chain:
            continue
        operands = [n for n in _operands(chain) if n not in chain]
        fixed.update(operands)
        _repeat(split, edge, chain, operands)
        if not split.caller_owns(storage_root(edge.forward)):
            notes += Notes(recomputed=(_entry(edge, operands),))
    return notes


def _largest_first(split: PartitionedGraph, cheap: Set[object]) -> list[SavedTensor]:
    """Candidates; among equals, later ones first, so that an output is dropped and its input kept, and views before roots."""
    position = {node: i for i, node in enumerate(split.fw.graph.nodes)}
    candidates = [
        e
        for e in split.edges
        if e.is_tensor and e.forward.op == "call_function" and (e.forward.target in cheap or AGAIN in e.forward.meta)
    ]
    return sorted(candidates, key=lambda e: (-nbytes(e.forward.meta["val"]), -position[e.forward]))


def _chain(value: Node, given: set[Node], split: PartitionedGraph, cheap: Set[object]) -> list[Node] | None:
    """The cheap nodes that make ``value`` from given ones, in graph order; None if there is no such chain."""
    chain: set[Node] = set()
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if node in chain or node in given or split.costs_nothing_to_keep(node):
            continue
        is_cheap = node.op == "call_function" and (node.target in cheap or AGAIN in node.meta)
        if not is_cheap or len(chain) == LONGEST_CHAIN:
            return None
        if node.target is GATHER and not _is_by_position(node):
            return None
        chain.add(node)
        waiting.extend(node.all_input_nodes)
    return [n for n in split.fw.graph.nodes if n in chain]


def _codes(split: PartitionedGraph) -> set[Node]:
    """Codes and scales that the forward makes for matmuls: keeping these takes less than keeping the decoded value."""
    return {n for n in split.fw.graph.nodes if ENCODING in n.meta}


def _operands(chain: list[Node]) -> list[Node]:
    return list(dict.fromkeys(n for node in chain for n in node.all_input_nodes))


def _is_by_position(gather: Node) -> bool:
    """Whether a gather takes rows by their numbers, not by a mask."""
    return all(n.meta["val"].dtype is not torch.bool for n in gather.all_input_nodes[1:])


def _repeat(split: PartitionedGraph, edge: SavedTensor, chain: list[Node], operands: list[Node]) -> None:
    """Copy ``chain`` into the backward, before the first use; operands that were not saved yet are saved now."""
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


def _made_already(node: Node, copied: Mapping[Node, Node], before: Node) -> Node | None:
    """What the backward has of ``node`` on the same operands, moved to where it is needed if it stands later."""
    wanted = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: copied[n])
    users = copied[node.all_input_nodes[0]].users if node.all_input_nodes else ()
    there = next((u for u in users if u.target is node.target and (u.args, u.kwargs) == wanted), None)
    if there is not None and there > before:
        before.prepend(there)
    return there


def _entry(edge: SavedTensor, operands: list[Node]) -> Recomputed:
    return Recomputed(edge.info, tuple(n.name for n in operands))
