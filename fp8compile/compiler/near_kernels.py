"""Which operations Inductor puts into one kernel under a memory budget: those that stand between the same two matmuls.

Changes no numbers. Inductor fuses kernels that read the same tensor wherever they stand. Under a budget the backward of one
layer computes its rotary embedding again, and the backward of the layer before it does, and both read the same table: as one
kernel they need both layers' values at one time. The gradients of two norms' weights are one kernel likewise, and what the
first needs waits for the second. So more is alive than the order of the graph says, which the budget was computed for.
What is fused less is read more often: the price is bytes, and the peak is that of the graph's order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.fx import Graph, Node

from fp8compile import _torch as private
from fp8compile.compiler.row_kernels import fusing_only_where
from fp8compile.fx.ops import contracts


def with_near_kernels(inner_compile: Callable[..., Any]) -> Callable[..., Any]:
    """An inner compiler of Inductor that fuses only what stands between the same two matmuls or attentions."""

    @functools.wraps(inner_compile)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        with fusing_only_where(_Near()):
            return inner_compile(*args, **kwargs)

    return compiled


class _Near:
    """Whether two of a scheduler's nodes stand between the same two matmuls, in the graph that is lowered."""

    def __init__(self) -> None:
        self.graph: Graph | None = None
        self.places: dict[Node, int] = {}

    def __call__(self, scheduler: Any, first: Any, second: Any) -> bool:
        graph = private.inductor_virtualized.graph.graph
        if graph is not self.graph:
            self.graph, self.places = graph, places_of(graph)
        places = {place for group in (first, second) for node in group.get_nodes() for place in self._place(node)}
        return len(places) < 2

    def _place(self, node: Any) -> tuple[int, ...]:
        """Where the last of the operations stands that an operation was lowered from; nothing where that is not known."""
        found = [self.places[origin] for origin in getattr(node.node, "origins", ()) if origin in self.places]
        return (max(found),) if found else ()


def places_of(graph: Graph) -> dict[Node, int]:
    """For each operation, how many matmuls and attentions stand before it or are it."""
    found, count = {}, 0
    for node in graph.nodes:
        count += contracts(node)
        found[node] = count
    return found
