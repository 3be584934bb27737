"""One step, run node by node on the graphs that fp8compile makes, until the first value that is not finite."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from fp8compile.compiler import report_store
from fp8compile.compiler.inductor import compile_once
from fp8compile.compiler.node_by_node import boxed, make_runnable
from fp8compile.fx.aot import BACKWARD, FORWARD, is_tangent, plain_position
from fp8compile.fx.provenance import module_path, source_line, whole_path
from fp8compile.recipe.recipe import Recipe
from fp8compile.tools.first_non_finite import FirstNonFinite
from fp8compile.tools.interpreter import MINUS, NonFiniteFinder, NonFiniteNode, all_finite, nonfinite_kinds, range_of
from fp8compile.tools.trial_step import (
    LIMIT,
    arguments,
    check_is_module,
    chosen_recipe,
    default_loss,
    left_as_it_was,
    one_step,
)

OPERATION, DATA, PARAMETER, BUFFER, OUTSIDE = "operation", "data", "parameter", "buffer", "outside"
UNCOMPILED = "made by code that is not compiled: {}"


def debug_step(
    model: nn.Module,
    batch: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    recipe: Recipe | str | Mapping[str, Any] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    scale: float = 1.0,
) -> FirstNonFinite | None:
    """One forward and backward on a fresh compilation, node by node, up to the first value that is not finite.

    Every intermediate is rounded to its dtype, where a generated kernel keeps FP32 between the operations it fuses: this
    is the stricter of the two, and may find what did not happen in training. One wait for the device per operation.
    Gradients, buffers and random number generators are left as they were; a model that is compiled goes on as it was.

    Args:
        model: a module, compiled or not.
        batch: what the model is called with: a tensor, a sequence of positional arguments, or a mapping of keywords.
        kwargs: keyword arguments beside positional ones.
        recipe: a Recipe, the name of a preset or a dict of fields; by default that of the running model, else the
            default recipe.
        loss: the scalar to differentiate, from the model's output; by default ``output.loss`` where there is one,
            else the sum of the floating-point outputs.
        scale: the loss scale: what the loss is multiplied by.

    Returns:
        The first value that is not finite, None if all are finite. -inf in a mask does not count.

    Raises:
        ValueError: no graph was compiled, ``loss`` is not a scalar, ``scale`` is not positive, or ``batch`` is a mapping
            beside ``kwargs``.
    """
    check_is_module(model, "tools.debug_step")
    args, keywords = arguments(batch, kwargs, "debug_step")
    if not scale > 0:
        raise ValueError(
            f"debug_step: scale={scale!r} is no loss scale; give a positive number, such as scaler.get_scale()"
        )
    eager = getattr(model, "_orig_mod", model)
    # The interpreter itself looks at every value, so no statistics are taken.
    step = _Step(eager, chosen_recipe(recipe, model).replace_in_all({"fp32.observe": False}), args, keywords)
    if step.found is not None:
        return step.found
    with left_as_it_was(eager), torch._dynamo.config.patch(recompile_limit=LIMIT), contextlib.suppress(_Stop):
        one_step(torch.compile(eager, backend=step.compile), args, keywords, step.scaled(loss, scale))
    if not step.graphs and step.found is None:
        raise ValueError(f"fp8compile.tools.debug_step: {report_store.NO_GRAPH_COMPILED}")
    return step.found


class _Stop(Exception):
    """Ends the step: what was found is in ``_Step.found``."""


class _Step:
    """One step of ``model``: names its tensors, compiles its graphs under watch, keeps the first finding."""

    def __init__(self, model: nn.Module, recipe: Recipe, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.recipe = recipe
        self.found: FirstNonFinite | None = None
        self.graphs = 0
        self.names: dict[int, str] = {}
        self.parameters = {id(parameter): name for name, parameter in model.named_parameters()}
        self.modules = {name for name, _ in model.named_modules()}
        self.masked: list[str] = []  # inputs that hold -inf
        for argument, whole in (*((f"argument {i}", arg) for i, arg in enumerate(args)), *kwargs.items()):
            for path, value in pytree.tree_flatten_with_path(whole)[0]:
                self._enter(argument + pytree.keystr(path), value, DATA)
        for kind, named in ((PARAMETER, model.named_parameters()), (BUFFER, model.named_buffers())):
            for name, value in named:
                self._enter(name, value, kind)

    def _enter(self, name: str, value: Any, kind: str) -> None:
        """Name a tensor that the step starts with, and check whether it is not finite."""
        if not isinstance(value, Tensor):
            return
        self.names[id(value)] = name
        if all_finite(value):
            return
        seen = range_of(name, value)
        if self.found is None and (nonfinite_kinds(value) != {MINUS} or kind == PARAMETER or seen.max > 0):
            self.found = FirstNonFinite(kind, "input", name, "", FORWARD, seen)
        self.masked.append(name)

    def stop(self, found: FirstNonFinite) -> None:
        """Keep what was found, if it is the first, and end the step."""
        self.found = self.found or found
        raise _Stop(found.line)

    def scaled(self, loss: Callable[[Any], Tensor] | None, scale: float) -> Callable[[Any], Any]:
        """The loss times its scale, checked on the way."""

        def scaled_loss(output: Any) -> Any:
            value = loss(output) if loss else default_loss(output)
            for name, each in (("loss", value), (f"loss * {scale:g}", None if value is None else value * scale)):
                if each is not None and not all_finite(each):
                    remark = UNCOMPILED.format("the loss, from an output of the model that is finite")
                    inputs = tuple(range_of("output", t) for t in pytree.tree_leaves(output) if isinstance(t, Tensor))
                    self.stop(
                        FirstNonFinite(OUTSIDE, "loss", name, "", FORWARD, range_of(name, each), inputs, remark)
                    )
            return each

        return scaled_loss

    def compile(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """The backend: the same passes as in training, then each graph node by node."""
        self.graphs += 1
        graph = _DebuggedGraph(self)
        compiled, _, _ = compile_once(gm, example_inputs, self.recipe, inner_compile=graph.inner)

        def run(*inputs: Any) -> Any:
            graph.enter(inputs)
            return compiled(*inputs)

        return run


class _DebuggedGraph:
    """One Dynamo graph: its forward and its backward, and the names of its inputs."""

    def __init__(self, step: _Step) -> None:
        self.step = step
        self.inputs: tuple[str, ...] = ()
        self.parameters: list[str] = []
        self.names: dict[str, str] = {}  # by node

    def enter(self, inputs: Sequence[Any]) -> None:
        """Before a call: name the inputs, and check those that code between the graphs has made."""
        known = self.step.names
        self.inputs = tuple(known.get(id(value), "") for value in inputs)
        self.parameters = [name for value in inputs if (name := self.step.parameters.get(id(value)))]
        for index, value in enumerate(inputs):
            if id(value) not in known and not all_finite(value) and nonfinite_kinds(value) != {MINUS}:
                name = f"input {index} of graph {self.step.graphs}"
                remark = UNCOMPILED.format("it stands before this graph, after a graph break")
                self.step.stop(FirstNonFinite(OUTSIDE, "input", name, "", FORWARD, range_of(name, value), (), remark))

    def inner(self, gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        """Inductor's inner compiler: called once for the forward graph and once for the backward graph."""
        make_runnable(gm)
        direction = BACKWARD if kwargs.get("is_backward") else FORWARD

        def run(*values: Any) -> Any:
            self._name(gm)
            self._look_at_tangents(gm, values)
            watching = NonFiniteFinder(gm, direction, self.names)
            result = watching.run(*values)
            self.names |= watching.outputs
            if watching.found is not None:
                self.step.stop(self._of(watching.found, direction))
            return result

        return boxed(run)

    def _of(self, made: NonFiniteNode, direction: str) -> FirstNonFinite:
        masked = ", ".join(self.step.masked)
        remark = f"{masked} came in with -inf, taken for a mask" if masked else ""
        module = self._path(made.module)
        return FirstNonFinite(OPERATION, made.op, module, made.source, direction, made.output, made.inputs, remark)

    def _path(self, module: str) -> str:
        return whole_path(module, self.step.modules, self.parameters)

    def _name(self, gm: GraphModule) -> None:
        for node in gm.graph.find_nodes(op="placeholder"):
            index = plain_position(node)
            if index is not None and index < len(self.inputs):
                self.names.setdefault(node.name, self.inputs[index] or node.name)

    def _look_at_tangents(self, gm: GraphModule, values: Sequence[Any]) -> None:
        for node, value in zip(gm.graph.find_nodes(op="placeholder"), values, strict=True):
            if is_tangent(node) and not all_finite(value):
                user = next(iter(node.users))
                remark = UNCOMPILED.format("the backward of the loss, or of what follows this graph")
                seen = range_of(node.name, value)
                place = self._path(module_path(user)), source_line(user)
                self.step.stop(FirstNonFinite(OUTSIDE, "input", *place, BACKWARD, seen, (), remark))
