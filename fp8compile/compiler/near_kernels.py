"""Which operations Inductor puts into one kernel: those that stand near each other. Changes no numbers.

Inductor fuses kernels that read the same tensor wherever they stand. The backward of one layer computes its rotary embedding
again, and the backward of the layer before it does, and both read the same table: as one kernel they need both layers'
values at one time. So more is alive than the order of the graph says. Two rules, by how many matmuls and attentions may
stand between what is one kernel:

    WITHIN_A_LAYER    in every graph that is rewritten: about those of a layer. What is fused within a layer still is.
    BETWEEN_TWO       under a memory budget, which was computed for the graph's order: none. What is fused less is read more
                      often: the price is bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from fp8compile import _torch as private
from fp8compile.compiler.row_kernels import fusing_only_where
from fp8compile.fx.ops import contracts

WITHIN_A_LAYER, BETWEEN_TWO = 8, 0


def with_near_kernels(inner_compile: Callable[..., Any], apart: int = BETWEEN_TWO) -> Callable[..., Any]:
    """An inner compiler of Inductor that fuses only what has at most ``apart`` matmuls and attentions between it."""

    @functools.wraps(inner_compile)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        with fusing_only_where(_Near(apart)):
            return inner_compile(*args, **kwargs)

    return compiled


class _Near:
    """Whether all operations of two of a scheduler's nodes stand near each other in the graph that is lowered."""

    def __init__(self, apart: int) -> None:
        self.apart = apart
        self.graph: Graph | None = None
        self.places: dict[Node, int] = {}

    def __call__(self, scheduler: Any, first: Any, second: Any) -> bool:
        graph = private.inductor_virtualized.graph.graph
        if graph is not self.graph:
            self.graph, self.places = graph, places_of(graph)
        places = {place for group in (first, second) for node in group.get_nodes() for place in self._place(node)}
        return not places or max(places) - min(places) <= self.apart

    def _place(self, node: Any) -> tuple[int, ...]:
        """Where the last of the operations stands that an operation was lowered from; nothing where that is not known."""
        found = [self.places[origin] for origin in getattr(node.node, "origins", ()) if origin in self.places]
        return (max(found),) if found else ()


def places_of(graph: Graph) -> dict[Node, int]:
    """For each operation, how many matmuls and attentions stand before it or are it.

    What is written back into the caller's memory, as a batch norm's running mean, stands at a graph's end for its readers'
    sake. It may be written where it is made, and keeps nothing alive there.
    """
    found, count = dict[Node, int](), 0
    for node in graph.nodes:
        count += contracts(node)
        found[node] = found[node.args[1]] if _writes_back(node) else count
    return found


def _writes_back(node: Node) -> bool:
    if node.target is not torch.ops.aten.copy_.default or not isinstance(node.args[1], Node):
        return False
    into = node.args[0]
    return isinstance(into, Node) and into.op == "placeholder"
