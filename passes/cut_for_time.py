"""Numbers stay as they are. Cuts the joint graph where plain Inductor would, codes of FP8 linears counted as what they are.

Upstream's min-cut never repeats in the backward what has to be written there for a matmul: that would take time. It does not
see this of an operand in FP8 that the wgrad reads transposed: between codes and matmul stands a copy, which it takes for
something that is fused. So a GELU was made again, written in 16 bit, read and encoded, to save one byte an element. Codes
that the forward makes are banned from being made again here, as the 16-bit value would be, and ``recompute_kept`` asks which
of them are worth that time. What is saved is the transposed copy, which the forward's encoding writes beside the codes.

Codes of parameters are made again as ever: kept, they would take a byte a parameter, however small the batch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from fp8compile import _torch as private
from fp8compile.fx.graph import ENCODING


def cut_for_time(
    gm: GraphModule, joint_inputs: Sequence[object], kwargs: Mapping[str, Any]
) -> tuple[GraphModule, GraphModule]:
    """Forward and backward graph; ``kwargs`` are what Inductor hands to a partitioner."""
    fixed = _made_of_parameters(gm.graph, kwargs.get("static_lifetime_input_indices") or ())
    codes = [n for n in gm.graph.nodes if ENCODING in n.meta and private.RECOMPUTE not in n.meta and n not in fixed]
    names = {n.name for n in codes}
    for node in codes:
        node.meta[private.RECOMPUTE] = CheckpointPolicy.MUST_SAVE
    fw, bw = private.min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
    for node in (n for half in (fw, bw) for n in half.graph.nodes if n.name in names):
        node.meta.pop(private.RECOMPUTE, None)  # other passes read what the user asks for
    return fw, bw


def _made_of_parameters(graph: Graph, static: Collection[int]) -> set[Node]:
    """Parameters and buffers, by their places among the inputs, and what is made of them and of constants alone."""
    found = {node for at, node in enumerate(graph.find_nodes(op="placeholder")) if at in static}
    for node in graph.nodes:
        if node.op == "call_function" and found.issuperset(node.all_input_nodes):
            found.add(node)
    return found
