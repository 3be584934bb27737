"""The order of a graph: what waits for nothing stands directly before what reads it first. No number changes.

    sink_weights       what is made of parameters alone. Codes of weights are spliced where their weight comes in, at the
                       graph's beginning: in that order all layers' codes would be in memory at once
    sink_recomputed    what of a backward depends on no incoming gradient. AOTAutograd puts it where the backward begins

Inductor searches for an order with a low peak, where it is let; code that runs node by node does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

import torch
from torch.fx import Graph, Node

from fp8compile.fx.aot import is_tangent
from fp8compile.fx.ops import draws_random_numbers, is_collective, is_mutating


def sink_weights(graph: Graph, parameters: Set[Node]) -> set[Node]:
    """Move what is computed from ``parameters`` alone to where it is read. Returns it, the parameters and constants with it.

    Left as it is: what only the graph's output reads; a graph that writes to its inputs, where a read must not move behind a
    write; random numbers, collectives and higher-order operators, whose order among each other may count.
    """
    if any(map(is_mutating, graph.nodes)):
        return set(parameters)
    known = {*parameters, *filter(_is_constant, graph.nodes)}
    made: set[Node] = set()
    for node in graph.nodes:
        if node.all_input_nodes and _may_move(node) and known.issuperset(node.all_input_nodes):
            known.add(node)
            made.add(node)
    theirs = {node for node in filter(_is_constant, known) if node.users and made.issuperset(node.users)}
    sink(graph, [node for node in graph.nodes if node in made or node in theirs])
    return known


def sink_recomputed(graph: Graph) -> None:
    """Move operations of a backward that depend on no tangent to where they are read; the same stays as above."""
    if any(map(is_mutating, graph.nodes)):
        return
    late = set[Node]()
    for node in graph.nodes:
        if is_tangent(node) or not late.isdisjoint(node.all_input_nodes):
            late.add(node)
    sink(graph, [node for node in graph.nodes if node not in late and _may_move(node)])


def sink(graph: Graph, nodes: Iterable[Node]) -> None:
    """Move each of ``nodes`` directly before its first reader, unless that is the output. They come in the graph's order."""
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
    """Whether an operation computes the same wherever it stands: it draws nothing, and nobody else takes part in it."""
    if node.op != "call_function" or not node.users or node.is_impure() or is_collective(node):
        return False
    return not draws_random_numbers(node) and not isinstance(node.target, torch._ops.HigherOrderOperator)
