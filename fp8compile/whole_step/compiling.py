"""The graph of a whole step through Inductor, in the order in which it stands. Changes no numbers.

Inductor puts operations into one kernel wherever they stand, if they read the same tensor. In a whole step that would undo
what two graphs get from their boundary, and what the order of the updates is for:

    encode and decode of a saved value     as one kernel they stand in the backward, and the value is kept until then
    an operation and its recomputation     as one kernel they stand in the forward
    the updates of two parameters          as one kernel they wait for the later gradient

So no kernel has operations of the forward and of what follows; and none updates two parameters, unless both are small.
Codes of a new weight are transposed in a kernel of their own (``APART``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import Graph, GraphModule

from fp8compile import _torch as private
from fp8compile.compiler.hooks import PostGradPasses
from fp8compile.compiler.inductor import with_our_kernels
from fp8compile.compiler.inductor_options import inductor_options, mode_options, our_options
from fp8compile.compiler.named_passes import with_theirs
from fp8compile.compiler.node_by_node import run_the_graph
from fp8compile.compiler.row_kernels import fusing_only_where
from fp8compile.compiler.watchers import run_watched
from fp8compile.fx.graph import is_tensor, numel
from fp8compile.recipe.recipe import Recipe
from fp8compile.whole_step.early import place_early
from fp8compile.whole_step.joined import APART, FIRST_UPDATE, FORWARD, PART

SMALL = 2**12  # elements up to which parameters may share a kernel
Compiled = Callable[[list[Any]], Sequence[Any]]


def compile_whole(module: GraphModule, recipe: Recipe, mode: str | None) -> Compiled:
    """Compiled code of a whole step; takes a list of inputs, which it empties."""
    inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    if recipe.debug.codegen == "eager":
        _watched_early(module.graph)
        return run_the_graph(module, inputs)
    patches = {**our_options(recipe), **mode_options(mode), **inductor_options(recipe)}
    patches |= with_theirs("post_grad_custom_post_pass", WholeStepPasses(recipe, _marks(module.graph)), patches)
    inner = with_our_kernels(private.compile_fx_inner, recipe)
    fake_mode: Any = private.detect_fake_mode(inputs)
    with (
        private.tracing(private.TracingContext(fake_mode)),
        private.inductor_virtualized.set_fake_mode(fake_mode),
        private.inductor_config.patch(patches),
        fusing_only_where(_in_one_part),
    ):
        compiled: Compiled = inner(module, inputs, static_input_idxs=(), is_inference=True)
    return compiled


class WholeStepPasses(PostGradPasses):
    """POST_GRAD on a whole step. Its identity, part of Inductor's cache key, has what only the nodes' meta says."""

    def __init__(self, recipe: Recipe, marks: str) -> None:
        super().__init__(recipe)
        self.marks = marks

    def __reduce__(self) -> tuple[Any, ...]:
        return WholeStepPasses, (self.recipe.as_compiled, self.marks)

    def uuid(self) -> tuple[str, str]:
        sources, recipe = super().uuid()
        return sources, f"{recipe} {self.marks}"

    def __call__(self, graph: Graph) -> None:
        super().__call__(graph)
        _watched_early(graph)


def _watched_early(graph: Graph) -> None:
    def run() -> bool:
        place_early(graph)
        return True

    run_watched(place_early.__name__, graph.owning_module, run)


def _marks(graph: Graph) -> str:
    marks = [(n.meta.get(PART), bool(n.meta.get(private.STORED)), bool(n.meta.get(APART))) for n in graph.nodes]
    return hashlib.sha256(repr(marks).encode()).hexdigest()


def _in_one_part(scheduler: Any, first: Any, second: Any) -> bool:
    """Whether two of the scheduler's nodes may be one kernel."""
    if _is_apart(first) != _is_apart(second):
        return False
    found = [_part(node) for group in (first, second) for node in group.get_nodes()]
    parts = {part for part, _ in found if part is not None}
    if FORWARD in parts and len(parts) > 1:
        return False
    updates = {part for part in parts if part >= FIRST_UPDATE}
    return len(updates) < 2 or all(size <= SMALL for part, size in found if part in updates)


def _is_apart(group: Any) -> bool:
    return any(APART in each.meta for node in group.get_nodes() for each in getattr(node.node, "origins", ()))


def _part(node: Any) -> tuple[int | None, int]:
    """The last part of a step that an operation was lowered from, None where that is not known; and the elements it has."""
    origins = [each for each in getattr(node.node, "origins", ()) if PART in each.meta]
    sizes = [numel(each.meta["val"]) for each in origins if is_tensor(each)]
    return max((each.meta[PART] for each in origins), default=None), max(sizes, default=0)
