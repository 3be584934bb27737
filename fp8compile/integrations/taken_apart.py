"""Backward operations taken apart as Inductor takes them apart, in a graph that a host traced without decompositions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fp8compile import _torch as private
from fp8compile.fx.graph import SPLICED, splice
from fp8compile.fx.ops import is_attention, is_matmul, opname
from fp8compile.integrations.overwriting import BACKWARD

KEPT = ("custom", "seq_nr", "nn_module_stack", "stack_trace", BACKWARD)


def take_apart(graph: Graph) -> None:
    """``silu_backward`` and its like become what Inductor makes of them, as far as it knows how; products stay."""
    for node in list(graph.nodes):
        if opname(node).endswith(("_backward", "_backward_data")) and not (is_matmul(node) or is_attention(node)):
            _take_apart(graph, node)


def _take_apart(graph: Graph, node: Node) -> None:
    operands, call, before = node.all_input_nodes, node.target, node.prev
    assert callable(call)

    def parts(*values: Tensor) -> Any:
        given = dict(zip(operands, values, strict=True))
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), given.__getitem__)
        return call(*args, **kwargs)

    result = splice(graph, parts, *operands, before=node)
    new: list[Node] = []
    while (each := before.next if not new else new[-1].next) is not node:
        new.append(each)
    if any(each.target is node.target for each in new):
        for each in reversed(new):
            graph.erase_node(each)
        return
    for each in new:
        del each.meta[SPLICED]
        each.meta |= {key: node.meta[key] for key in KEPT if key in node.meta}
    if isinstance(result, Node):
        node.replace_all_uses_with(result)
    else:
        for part in list(node.users):
            assert part.target is private.getitem
            part.replace_all_uses_with(result[part.args[1]])
            graph.erase_node(part)
    graph.erase_node(node)
