"""Which values of the forward a backward graph computes again.

    forward   y = view(x, [s * t, 64])      backward   y' = view(x', [n, 64])       y' is y where x' is x and n is s t

A size has no element that could be off, so it is known by its value: a number, or an expression of the graph's symbols. Which
half computes it, and in how many steps, is of no account.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8compile.fx.graph import COPY_OF, SIZES, is_size
from fp8compile.fx.ops import CONSTANTS, draws_random_numbers
from fp8compile.fx.partition import PartitionedGraph

Same = Mapping[Node, Node]


def recomputed(split: PartitionedGraph) -> Same:
    """Nodes of the backward, each with the node of the forward that has the same value: what is saved, sizes that both halves
    know, and what does the same with the same operands, constants included. A copy made to be saved is what it copies."""
    found = {edge.backward: edge.forward.meta.get(COPY_OF, edge.forward) for edge in split.edges}
    sizes = [node for node in split.fw.graph.nodes if is_size(node)]
    for node in split.bw.graph.nodes:
        if node not in found:
            early = _size_like(node, sizes) if is_size(node) else _does_the_same(node, split.fw.graph, found)
            found |= {node: early} if early is not None else {}
    return found


def _size_like(late: Node, sizes: Iterable[Node]) -> Node | None:
    return next((early for early in sizes if _are_equal(late, early)), None)


def _does_the_same(late: Node, forward: Graph, found: Same) -> Node | None:
    """The operation of the forward on the same operands, or the same constant."""
    operands = [n for n in late.all_input_nodes if not is_size(n)]
    if late.op not in ("call_function", "get_attr") or draws_random_numbers(late):
        return None
    if any(n not in found for n in operands):
        return None
    found_at = found[operands[0]].users if operands else forward.find_nodes(op=late.op, target=late.target)
    return next((early for early in found_at if _is_same(late, early, found)), None)


def _is_same(late: Node, early: Node, found: Same) -> bool:
    if late.op == "get_attr":
        return _attribute(late) is _attribute(early)
    same = early.target is late.target
    return same and _equal(late.args, early.args, found) and _equal(late.kwargs, early.kwargs, found)


def _attribute(node: Node) -> object:
    return operator.attrgetter(str(node.target))(node.graph.owning_module)


def _equal(late: Any, early: Any, found: Same) -> bool:
    """Whether arguments are the same, each in its own half."""
    if is_size(late) or is_size(early):
        return _are_equal(late, early)
    if isinstance(late, Node):
        own = found.get(late)
        return own is not None and (own is early or _are_one_constant(own, early))
    if isinstance(late, (list, tuple)):
        alike = isinstance(early, (list, tuple)) and len(late) == len(early)
        return alike and all(_equal(a, b, found) for a, b in zip(late, early, strict=True))
    if isinstance(late, Mapping):
        alike = isinstance(early, Mapping) and late.keys() == early.keys()
        return alike and all(_equal(late[key], early[key], found) for key in late)
    return type(late) is type(early) and bool(late == early or (late != late and early != early))  # or both are NaN


def _are_one_constant(a: Node, b: Any) -> bool:
    """Whether two values of the forward are one number: it has several NaNs, since none is merged."""
    return isinstance(b, Node) and a.target in CONSTANTS and _is_same(a, b, {})


def _are_equal(late: Any, early: Any) -> bool:
    """Whether two sizes, or a size and a number, are one for all values that the symbols may have."""
    a, b = (each.meta.get("val") if isinstance(each, Node) else each for each in (late, early))
    return isinstance(a, SIZES) and isinstance(b, SIZES) and statically_known_true(a == b)
