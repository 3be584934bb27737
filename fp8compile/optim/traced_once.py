"""A step's graph, traced once and handed to Inductor as it is.

AOTAutograd would trace it three times more, for gradients, for outputs that are views, and for what is written in place. A
step has none of the first two. It writes by copies into its inputs behind everything else, as AOTAutograd would have it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fp8compile import _torch as private

InnerCompile = Callable[..., Any]
aten = torch.ops.aten


def traced(step: Callable[..., Any], flat: Sequence[Any], *, decomposed: bool = True) -> GraphModule:
    """The graph of ``step(*flat)``, of fakes.

    Args:
        decomposed: into what Inductor lowers. A dump shows the operations as they were written.

    Raises:
        AssertionError: it writes anything but an input, or reads what it has written.
    """
    decompositions = private.select_decomp_table() if decomposed else {}
    # "symbolic": fake tensors, with Python's decompositions of what C++ does to known sizes alone
    with torch.no_grad():
        graph = private.make_fx(step, tracing_mode="symbolic", decomposition_table=decompositions)(*flat)
    _check(graph)
    if decomposed:
        _leave_out_what_does_nothing(graph)
    # Without the environment of its sizes, which no cache takes in a key (torch 2.11).
    return GraphModule(graph, graph.graph)


def _leave_out_what_does_nothing(graph: GraphModule) -> None:
    """Aliases, and a dtype's bits viewed as another's and back: Inductor orders a kernel by such nodes, and a thread would
    hold more values at once (FP32: 130 registers in place of 96)."""
    for node in [*graph.graph.nodes]:
        if node.target is aten.alias.default:
            same = node.args[0]
        elif node.target is aten.view.dtype and (source := _bits_of(node)).meta["val"].dtype == node.args[1]:
            same = source
        else:
            continue
        node.replace_all_uses_with(same)
    graph.graph.eliminate_dead_code()


def _bits_of(node: Node) -> Node:
    """The value whose bits a view by dtype, or several, show."""
    while node.target is aten.view.dtype:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _check(graph: GraphModule) -> None:
    written: set[Node] = set()
    for node in graph.graph.nodes:
        assert written.isdisjoint(node.all_input_nodes), f"{node} reads what the step has written"
        if getattr(getattr(node.target, "_schema", None), "is_mutable", False):
            into = node.args[0]
            copies = node.target is aten.copy_.default and into.op == "placeholder"
            assert copies, f"{node} writes what is no input of the step"
            written |= {into, node}


def lowered(
    graph: GraphModule, flat: Sequence[Any], mode: Any, inner_compile: InnerCompile = private.compile_fx_inner
) -> Callable[..., Any]:
    """Code for a graph that was traced of ``flat`` under ``mode``; it takes what the graph takes."""
    context = private.tracing(private.TracingContext(mode))
    with context, private.enable_python_dispatcher(), torch.no_grad():
        code = inner_compile(graph, flat, is_inference=True)
    return lambda *taken: code([*taken])
