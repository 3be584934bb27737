"""The order of a graph: what is made of parameters alone stands directly before what reads it first. No number changes.

Codes of weights are spliced where their weight comes in, which is the graph's beginning: in that order all layers' codes
would be in memory at once. Inductor may schedule them later, and code that runs node by node does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

import torch
from torch.fx import Graph, Node

from fp8compile.fx.ops import is_collective


def sink_weights(graph: Graph, parameters: Set[Node]) -> set[Node]:
    """Move what is computed from ``parameters`` alone to where it is read. Returns it, the parameters and constants with it.

    Left as it is: what only the graph's output reads, and a graph that writes to its inputs, where a read must not move
    behind a write.
    """
    if any(_writes(node) for node in graph.nodes):
        return set(parameters)
    known = parameters | {node for node in graph.nodes if _is_constant(node)}
    made: set[Node] = set()
    for node in graph.nodes:
        if node.all_input_nodes and _may_move(node) and known.issuperset(node.all_input_nodes):
            known.add(node)
            made.add(node)
    theirs = {node for node in known if _is_constant(node) and node.users and made.issuperset(node.users)}
    sink(graph, [node for node in graph.nodes if node in made or node in theirs])
    return known


def sink(graph: Graph, nodes: Iterable[Node]) -> None:
    """Move each of ``nodes``, which stand in the graph's order, directly before its first reader, unless that is the output."""
    order = list(graph.nodes)
    place = {node: at for at, node in enumerate(order)}
    moving = list(nodes)
    for node in reversed(moving):
        first = min(place[user] for user in node.users)
        place[node] = place[node] if order[first].op == "output" else first
    for node in moving:
        if (reader := order[place[node]]) is not node:
            reader.prepend(node)


def _is_constant(node: Node) -> bool:
    """Whether a node is a number as a tensor, which has no operands."""
    return node.target is torch.ops.aten.scalar_tensor.default


def _may_move(node: Node) -> bool:
    return node.op == "call_function" and bool(node.users) and not node.is_impure() and not is_collective(node)


def _writes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return bool(schema and schema.is_mutable)
