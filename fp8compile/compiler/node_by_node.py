"""A graph that is not compiled but run as it is, node by node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fp8compile.compiler.seeded_random import draw_from_seeds

prims = torch.ops.prims

# What the decomposition of torch.eye counts in, and no operator does on a CPU.
UNCOUNTED = (torch.uint16, torch.uint32, torch.uint64)


def boxed(run: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    """``run(*values)`` as what Inductor's inner compiler returns: called with a list, which is emptied.

    The caller's list must not keep the inputs alive.
    """

    def call(values: list[Any]) -> Any:
        own = list(values)
        values.clear()
        return run(*own)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def run_the_graph(gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    """The inner compiler of ``debug.codegen="eager"``: the rewritten graph itself, run node by node."""
    make_runnable(gm)
    return boxed(gm)


def run_nothing(gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    """An inner compiler for graphs that are looked at and never run."""
    return boxed(lambda *values: None)


def make_runnable(gm: GraphModule) -> None:
    """Make what only generated code can do something that operators can, in place."""
    draw_from_seeds(gm)
    counters = [n for n in gm.graph.nodes if n.target is prims.iota.default and n.kwargs["dtype"] in UNCOUNTED]
    for node in counters:
        _count_in_int64(node)
    if counters:
        gm.recompile()


def _count_in_int64(node: Node) -> None:
    dtype = node.kwargs["dtype"]
    node.kwargs = {**node.kwargs, "dtype": torch.int64}
    with node.graph.inserting_after(node):
        narrow = node.graph.call_function(prims.convert_element_type.default, (node, dtype))
    narrow.meta["val"], node.meta["val"] = node.meta["val"], node.meta["val"].to(torch.int64)
    node.replace_all_uses_with(narrow, delete_user_cb=lambda user: user is not narrow)
