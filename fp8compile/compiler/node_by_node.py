"""A graph that is not compiled but run as it is, node by node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

from fp8compile.compiler.seeded_random import draw_from_seeds


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
    """The inner compiler of ``codegen="eager"``: the rewritten graph itself, run node by node."""
    draw_from_seeds(gm)
    return boxed(gm)
