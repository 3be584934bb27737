"""The backward's order: what depends on no incoming gradient stands directly before what reads it first.

AOTAutograd puts what the backward computes again from saved values where the backward begins, and leaves its place to
Inductor's search for an order with a low peak. Where the order of the graph is a schedule, that search is off.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from fp8compile.fx.aot import is_tangent
from fp8compile.fx.ops import is_collective


def sink_recomputed(graph: Graph) -> None:
    """Move operations of a backward that depend on no tangent to where they are read. No number changes.

    Left as they are: a graph that writes to its inputs, where a read must not move behind a write; random numbers,
    collectives and higher-order operators, whose order among each other may count.
    """
    nodes = list(graph.nodes)
    if any(_writes(node) for node in nodes):
        return
    late = _of_tangents(nodes)
    before = {node: at for at, node in enumerate(nodes)}
    moving = [node for node in nodes if node not in late and _may_move(node)]
    for node in reversed(moving):
        before[node] = min(before[user] for user in node.users)
    for node in moving:
        nodes[before[node]].prepend(node)


def _may_move(node: Node) -> bool:
    """Whether an operation computes the same wherever it stands: it draws nothing, and nobody else takes part in it."""
    if node.op != "call_function" or not node.users or node.is_impure() or is_collective(node):
        return False
    draws = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return not draws and not isinstance(node.target, torch._ops.HigherOrderOperator)


def _of_tangents(nodes: list[Node]) -> set[Node]:
    """What is computed from incoming gradients."""
    found: set[Node] = set()
    for node in nodes:
        if is_tangent(node) or any(parent in found for parent in node.all_input_nodes):
            found.add(node)
    return found


def _writes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return bool(schema and schema.is_mutable)
