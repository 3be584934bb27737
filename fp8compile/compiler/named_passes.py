"""How one pass is run: under its name, by which it is switched off, watched and verified; and with the user's own passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.fx import Graph, GraphModule

from fp8compile import _torch as private
from fp8compile.compiler.watchers import run_watched
from fp8compile.fx import spec
from fp8compile.fx.partition import PartitionedGraph


class InTurn(private.CustomGraphPass):
    """Several passes in the place of one: torch 2.11 takes no list of them."""

    def __init__(self, *passes: Callable[[Graph], None]) -> None:
        self.passes = passes

    def __call__(self, graph: Graph) -> None:
        for each in self.passes:
            each(graph)

    def uuid(self) -> tuple[Any, ...] | None:
        """None, by which Inductor's cache is not asked, where a pass has no identity."""
        known = [each.uuid() if isinstance(each, private.CustomGraphPass) else None for each in self.passes]
        return tuple(known) if all(known) else None


def with_theirs(name: str, ours: Callable[[Graph], None], patches: Mapping[str, Any]) -> dict[str, Any]:
    theirs = patches.get(name, getattr(private.inductor_config, name))
    before = theirs if isinstance(theirs, (list, tuple)) else [theirs] if theirs else []
    return {name: InTurn(*before, ours) if before else ours}


def watched(gm: GraphModule, name: str, run: Callable[[], Any], split: PartitionedGraph | None = None) -> Any:
    """What ``run`` returns, or None where the pass of that name is disabled. Dumps see ``split``, or else ``gm``."""
    return run_watched(name, split or gm, lambda: _unless_disabled(gm, name, run))


def observed(gm: GraphModule, name: str, run: Callable[[], Any], split: PartitionedGraph | None = None) -> Any:
    """The same of a pass behind which graphs are as ``fx.spec`` says."""
    result = watched(gm, name, run, split)
    if spec.enabled:
        cut = result if isinstance(result, tuple) else (split.fw, split.bw) if split else (gm,)
        for part in cut:
            spec.verify(part.graph, name)
    return result


def _unless_disabled(gm: GraphModule, name: str, run: Callable[[], Any]) -> Any:
    observer = private.GraphTransformObserver(gm, name, subsystem="fp8compile")
    return observer.apply_gm_pass(lambda _: run())
