"""Operations of a traced graph that write into a tensor which they were given, and whom that concerns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fp8compile.fx.graph import is_tensor

BACKWARD = "autograd_backward"  # in the meta of what autograd has made


def is_backward(node: Node) -> bool:
    """Whether autograd has made a node."""
    return bool(node.meta.get(BACKWARD))


def overwrites(node: Node) -> bool:
    """Whether an operation writes into a tensor that it was given."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def make_functional(graph: Graph) -> None:
    """``add_(x, y)`` becomes ``add(x, y)`` where ``x`` is made in the graph, and nobody else reads it or its memory."""
    sharing = Counter(_memory(node) for node in graph.nodes if is_tensor(node))
    for node in graph.nodes:
        functional = _functional(node)
        written = node.args[0] if functional else None
        if not isinstance(written, Node) or written.op != "call_function" or len(written.users) > 1:
            continue
        if sharing[_memory(written)] == 1 + _same_memory_from(node):
            node.target = functional


class Writes:
    """What the writes of a graph concern.

    Attributes:
        touched: values in memory that some operation writes into, and all that is computed from them.
        gradients: what autograd has made, what is computed from it, and the memory that any of it is written into.
    """

    def __init__(self, graph: Graph) -> None:
        written = {_memory(value) for node in graph.nodes for value in _written(node)}
        self.touched: set[Node] = set()
        self.gradients: set[Node] = set()
        filled: set[int] = set()
        for node in graph.nodes:
            if (is_tensor(node) and _memory(node) in written) or any(n in self.touched for n in node.all_input_nodes):
                self.touched.add(node)
            if is_backward(node) or any(n in self.gradients for n in node.all_input_nodes):
                self.gradients.add(node)
                filled |= set(map(_memory, _written(node)))
        self.gradients |= {node for node in graph.nodes if is_tensor(node) and _memory(node) in filled}


def _written(node: Node) -> Iterator[Node]:
    """The values that an operation writes into."""
    if overwrites(node):
        for i, each in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
            given = node.args[i] if i < len(node.args) else node.kwargs.get(each.name)
            if each.alias_info is not None and each.alias_info.is_write:
                yield from (
                    n for n in (given if isinstance(given, (list, tuple)) else (given,)) if isinstance(n, Node)
                )


def _functional(node: Node) -> Any:
    """``aten.add.Scalar`` for a node that calls ``aten.add_.Scalar``; None where there is no such operation."""
    target: Any = node.target
    if not overwrites(node) or not target._opname.endswith("_"):
        return None
    return getattr(getattr(torch.ops.aten, target._opname[:-1], None), target._overloadname, None)


def _same_memory_from(node: Node) -> int:
    """How many values share a value's memory among itself and those that are computed from it."""
    found = {node: None}
    for each in (waiting := [node]):
        for user in each.users:
            if user not in found and is_tensor(user) and _memory(user) == _memory(node):
                found[user] = None
                waiting.append(user)
    return len(found)


def _memory(node: Node) -> int:
    """A number that two fake tensors share if one is a view of the other."""
    value = node.meta["val"]
    assert isinstance(value, Tensor)
    return int(value.untyped_storage()._cdata)
