"""The kernels of a graph, listed when Inductor has decided which operations go into one kernel. Changes no numbers.

Inductor calls a hook with its scheduler's nodes after fusion: each is a kernel of its own. A kernel counts the bytes of what
it reads and writes once, as Inductor does; what its operations hand to each other inside it does not count.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import Node

from fp8compile import _torch as private
from fp8compile.cost.op_cost import flops, is_priced
from fp8compile.fx.ops import contracts, is_view, opname
from fp8compile.fx.provenance import origin
from fp8compile.reporting.kernel import GENERATED, LIBRARY, Kernel

NO_KERNELS = "NopKernelSchedulerNode"  # of what is only a view, or memory without a content
MOST_MODULES = 3  # that a kernel names beside its own


def listing(kernels: list[Kernel]) -> Callable[..., Any]:
    """Inductor's inner compiler, which adds the kernels of each graph that it compiles to ``kernels``."""

    @functools.wraps(private.compile_fx_inner)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        half = "backward" if kwargs.get("is_backward") else "inference" if kwargs.get("is_inference") else "forward"

        def listed(nodes: Sequence[Any]) -> Sequence[Any]:
            kernels.extend(kernels_of(nodes, half))
            return nodes

        with private.inductor_config.patch(_post_fusion_custom_pass=listed):
            return private.compile_fx_inner(*args, **kwargs)

    return compiled


def kernels_of(scheduled: Sequence[Any], half: str) -> list[Kernel]:
    """The kernels of a scheduler's nodes, in their order; parts of a library's result move nothing and are none."""
    real = [each for each in scheduled if type(each).__name__ != NO_KERNELS]
    moving = [each for each in real if each.get_read_write_buffers_sizes() or not each.is_extern()]
    place = {node: at for at, node in enumerate(private.inductor_virtualized.graph.graph.nodes)}
    return [_kernel(each, _operations(each, place), half, number) for number, each in enumerate(moving)]


def _kernel(scheduled: Any, inside: list[Node], half: str, number: int) -> Kernel:
    is_matmul = scheduled.is_extern() or scheduled.is_template()
    inside = inside[-1:] if scheduled.is_extern() else inside  # the others were computed into its operands
    found = [origin(node) for node in reversed(inside)]
    counted = Counter(opname(node) for node in inside if not is_view(node))
    others = sorted({each.module for each in found if each.module} - {each.module for each in found[:1]})
    more = f" and {len(others) - MOST_MODULES} more" if len(others) > MOST_MODULES else ""
    return Kernel(
        half,
        number,
        LIBRARY if scheduled.is_extern() else GENERATED,
        found[0].module if found else "",
        ", ".join(others[:MOST_MODULES]) + more,
        ", ".join(f"{count} {name}" if count > 1 else name for name, count in counted.most_common()),
        inside[-1].name if inside else "",
        found[0].source if found else "",
        int(scheduled.get_read_buffer_sizes()),
        int(scheduled.get_write_buffer_sizes()),
        sum(flops(node) for node in inside if is_matmul and contracts(node) and is_priced(node)),
    )


def _operations(scheduled: Any, place: Mapping[Node, int]) -> list[Node]:
    """The graph's nodes that a kernel computes, in the graph's order."""
    found = {node for each in scheduled.get_nodes() if each.node is not None for node in each.node.get_origins()}
    return sorted((node for node in found if node.op == "call_function" and node in place), key=place.__getitem__)
