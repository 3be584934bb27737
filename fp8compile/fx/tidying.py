"""A traced graph without what a trace leaves in it: what Inductor takes to compile grows with the number of nodes.

Changes no numbers. Three kinds of nodes go: aliases, views in the shape that a value has already, and second makings of one
value. What the function returns stays, since passes mark the nodes of results.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import torch
from torch.fx import Graph, Node

from fp8compile.fx.ops import RESHAPES, draws_random_numbers, is_mutating

aten = torch.ops.aten


def tidy(graph: Graph) -> None:
    """Take such nodes out of a functional graph, whose nodes have their values in ``meta["val"]``."""
    results = set(graph.output_node().all_input_nodes)
    known: dict[Hashable, Node] = {}
    for node in graph.nodes:
        if node.op != "call_function" or _may_differ(node):
            continue
        same = _itself(node) or known.setdefault(_key(node), node)
        if same is not node and node not in results:
            node.replace_all_uses_with(same)
            graph.erase_node(node)


def _may_differ(node: Node) -> bool:
    """Whether a second call may have another result, or an effect of its own."""
    return not hasattr(node.target, "_schema") or is_mutating(node) or draws_random_numbers(node)


def _itself(node: Node) -> Node | None:
    """The operand that ``node`` is another name of; None for a value of its own."""
    operand = node.args[0] if node.args else None
    if not isinstance(operand, Node):
        return None
    if node.target is aten.alias.default:
        return operand
    if node.target not in RESHAPES:
        return None
    shape, before = node.meta["val"].shape, operand.meta["val"].shape
    known = all(isinstance(size, int) for size in (*shape, *before))  # a comparison of others would guard on them
    return operand if known and shape == before else None


def _key(node: Node) -> Hashable:
    """Equal for calls of one operation with the same operands and constants."""
    return node.target, _constant(node.args), _constant(sorted(node.kwargs.items()))


def _constant(value: Any) -> Hashable:
    """A constant with its type, since 1, 1.0 and True differ; a NaN equals no other."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_constant, value))
    if isinstance(value, float):
        return object() if math.isnan(value) else value.hex()
    return value if isinstance(value, Node) else (type(value), value)
