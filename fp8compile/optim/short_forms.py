"""The last that is done to a captured step: short forms of functions; numbers of the step apart from elements."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node

from fp8compile.numerics.near_functions import OPERATORS
from fp8compile.optim.proofs import packet_of

aten = torch.ops.aten
ELEMENTWISE = (aten._to_copy, aten.where, aten.lerp, aten.zeros_like, aten.ones_like)


def once(graph: Graph) -> None:
    """Compute what is computed twice once, in place; nothing here is random or writes."""
    found: dict[Any, Node] = {}
    for node in [*graph.nodes]:
        key = node.target, node.args, tuple(node.kwargs.items())
        if node.op == "call_function" and (same := found.setdefault(repr(key), node)) is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    graph.eliminate_dead_code()


def shortened(graph: Graph, of_step: Collection[Node], roots: Collection[Node]) -> None:
    """Write what elements need in the form that a GPU has in few instructions, in place.

    Args:
        of_step: placeholders of the step's numbers.
        roots: square roots whose argument is never negative.
    """
    one = one_number_nodes(graph, of_step)
    for node in [*graph.nodes]:
        if node in one or node.op != "call_function" or not _is_fp32(node):
            continue
        if node.target is aten.sqrt.default and node in roots:
            node.target = OPERATORS["sqrt"]
        elif node.target is aten.div.Tensor and all(map(_is_fp32, node.args)):
            node.target = OPERATORS["quotient"]
        elif packet_of(node) is aten.lerp and node.args[2] in one:
            _write_lerp(graph, node)
    graph.eliminate_dead_code()
    graph.lint()


def _is_fp32(node: Any) -> bool:
    return isinstance(node, Node) and isinstance(v := node.meta.get("val"), torch.Tensor) and v.dtype == torch.float32


def _write_lerp(graph: Graph, node: Node) -> None:
    """torch.lerp, which takes another form past the middle, in one: ``start (1 - weight) + end weight``."""
    start, end, weight = cast("tuple[Node, Node, Node]", node.args)
    with graph.inserting_before(node):
        rest = graph.call_function(aten.rsub.Scalar, (weight, 1.0))
        kept = graph.call_function(aten.mul.Tensor, (start, rest))
        new = graph.call_function(aten.addcmul.default, (kept, end, weight))
    for each, like in ((rest, weight), (kept, node), (new, node)):
        each.meta["val"] = like.meta["val"]
    node.replace_all_uses_with(new)


def one_number_nodes(graph: Graph, of_step: Collection[Node]) -> set[Node]:
    """Nodes that are made of the step's numbers, or of nothing."""
    found = {*of_step}
    for node in graph.nodes:
        is_one = node.op in ("call_function", "get_attr") and not _dimensions(node)
        if is_one and all(each in found for each in node.all_input_nodes):
            found.add(node)
    return found


def _dimensions(node: Node) -> int:
    value = node.meta.get("val")
    return value.dim() if isinstance(value, torch.Tensor) else 0


def apart(
    graph: Graph, of_step: Sequence[Node], of_elements: Sequence[Node], singles: int
) -> tuple[GraphModule, GraphModule, tuple[str, ...]]:
    """Elements and numbers of a step as graphs of their own, and the names of the numbers that elements take.

    Args:
        singles: how many one-number states there are: the last outputs but for the count of steps.
    """
    outputs: Any = graph.output_node().args[0]
    width = len(of_elements) - 1  # p and states
    one = one_number_nodes(graph, of_step)
    mine = [node for node in graph.nodes if node.op == "call_function" and node not in one]
    needed = [*dict.fromkeys(each for node in mine for each in node.all_input_nodes if each in one)]
    needed += [each for each in outputs[:width] if each in one and each not in needed]
    scalars = Graph()
    copied = {node: scalars.placeholder(node.name) for node in of_step}
    for node in graph.nodes:
        if node in one and node not in copied:
            copied[node] = scalars.node_copy(node, copied.__getitem__)
    new = outputs[width : width + singles]
    scalars.output([copied[each] if isinstance(each, Node) else each for each in (*needed, *new)])
    scalars.eliminate_dead_code()
    elements = Graph()
    here = {node: elements.placeholder(name) for node, name in zip(of_elements, _names(of_elements), strict=True)}
    names = tuple(f"n{i}" for i in range(len(needed)))
    taken = [elements.placeholder(name) for name in names]
    for node, placeholder in zip(needed, taken, strict=True):
        is_bool = node.meta["val"].dtype == torch.bool
        here[node] = elements.call_function(aten.ne.Scalar, (placeholder, 0.0)) if is_bool else placeholder
    for node in mine:
        here[node] = elements.node_copy(node, here.__getitem__)
    elements.output([here[each] for each in outputs[:width]])
    return GraphModule({}, elements), GraphModule({}, scalars), names


def _names(of_elements: Sequence[Node]) -> list[str]:
    return ["p", "g", *(f"state{i}" for i in range(len(of_elements) - 2))]


def is_elementwise(graph: Graph) -> bool:
    """Whether each element of what a graph returns depends on the same element of what it takes alone, for any shape."""
    for node in graph.nodes:
        target: Any = node.target
        if node.op != "call_function":
            continue
        if not (packet_of(node) in ELEMENTWISE or torch.Tag.pointwise in getattr(target, "tags", ())):
            return False
    return True
