"""Which values of the forward a backward graph computes again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.fx import Node
from torch.fx.node import map_arg

from fp8compile.fx.partition import PartitionedGraph


def recomputed(split: PartitionedGraph) -> Mapping[Node, Node]:
    """Nodes of the backward, each with the node of the forward that does the same with the same operands."""
    found = {edge.backward: edge.forward for edge in split.edges}
    for node in split.bw.graph.nodes:
        operands = node.all_input_nodes
        if node.op == "call_function" and operands and all(n in found for n in operands):
            same = next((n for n in found[operands[0]].users if _does_the_same(node, n, found)), None)
            if same is not None:
                found[node] = same
    return found


def _does_the_same(late: Node, early: Node, found: Mapping[Node, Node]) -> bool:
    def in_forward(argument: Any) -> Any:
        return map_arg(argument, found.__getitem__)

    same = early.target is late.target and len(early.args) == len(late.args)
    return same and in_forward(late.args) == early.args and in_forward(late.kwargs) == early.kwargs
