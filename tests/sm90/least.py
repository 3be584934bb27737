"""The least bytes that generated kernels can move in a graph, whatever is fused with what.

    least = sum of what comes in from outside and is read + sum of what must lie in memory when the kernels are through

Outside are the graph's inputs and the kernels that are not generated (products, attention). Each value counts once per
direction, by the tensor beneath its views: one kernel with unbounded registers would move exactly this. A scale that is
taken from the very tensor (its amax first) makes a second read needful that is not counted here.
"""

from __future__ import annotations

from torch import Tensor
from torch.fx import Graph, Node

from fp8compile import _torch as private
from fp8compile.fx.graph import nbytes, storage_root
from fp8compile.fx.ops import is_view

PRODUCTS_AND_ATTENTION = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm")


def is_extern(node: Node) -> bool:
    """Whether Inductor calls a library for this node."""
    name = str(getattr(node.target, "_opname", ""))
    return name in PRODUCTS_AND_ATTENTION or "attention" in name


def least_bytes(graph: Graph) -> int:
    """The sum in the module's docstring, of a post-AOT graph."""
    read = {storage_root(v) for node in graph.nodes if _generated(node) for v in node.all_input_nodes}
    outside = {v for v in read if _is_tensor(v) and not _generated(v)}
    needed = {storage_root(v) for node in graph.nodes if _leaves(node) for v in node.all_input_nodes}
    made = {v for v in needed if _is_tensor(v) and _generated(v)}
    return sum(nbytes(v.meta["val"]) for v in (*outside, *made))


def _generated(node: Node) -> bool:
    maker = node.args[0] if node.target is private.getitem else node
    assert isinstance(maker, Node)
    return maker.op == "call_function" and not (is_extern(maker) or is_view(maker))


def _leaves(node: Node) -> bool:
    return node.op == "output" or is_extern(node)


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)
