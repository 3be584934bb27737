"""What was done to a model: ``explain`` compiles afresh and tells, ``report`` tells of the model that is running."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from fp8compile import store
from fp8compile.backend import compile_and_report
from fp8compile.recipe import Recipe
from fp8compile.report import GraphReport, Report

LIMIT = 1024  # explain compiles the same code once more for every recipe; Dynamo's usual limit is 8


def report(compiled: nn.Module) -> Report:
    """The report of the graphs compiled so far for a model, as returned by torch.compile or compiled in place.

    Raises:
        ValueError: no graph of this model was compiled by fp8compile, so there is nothing to report.
    """
    found = store.compiled_for(compiled)
    if not found:
        raise ValueError(
            f"no graph of this {type(compiled).__name__} was compiled by fp8compile. If it has not run yet, run one "
            f"step first. If it has: {store.NOTHING}"
        )
    return Report(tuple(r for c in found for r in c.reports), str(found[-1].recipe))


def explain(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    recipe: Recipe | str | None = None,
    loss: Callable[[Any], Tensor] | None = None,
) -> Report:
    """What fp8compile does to ``model``: one forward and backward on a fresh compilation, without generating kernels.

    Gradients, buffers and random number generators are left as they were; a model that is compiled goes on as it was.

    Args:
        model: a module, compiled or not.
        args: positional example arguments.
        kwargs: keyword example arguments.
        recipe: a Recipe or the name of a preset; by default that of the running model, else the default recipe.
        loss: the scalar to differentiate, from the model's output; by default ``output.loss`` where there is one,
            else the sum of the floating-point outputs.

    Raises:
        ValueError: no graph was compiled, or ``loss`` is not a scalar.
    """
    eager = getattr(model, "_orig_mod", model)
    chosen = _chosen(recipe, eager)
    graphs: list[GraphReport] = []

    def listen(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled, reports = compile_and_report(gm, example_inputs, chosen, generate=False, keep_steps=True)
        graphs.extend(reports)
        return compiled

    arguments = (args,) if isinstance(args, Tensor) else tuple(args)
    with _left_as_it_was(eager), torch._dynamo.config.patch(recompile_limit=LIMIT):
        _one_step(torch.compile(eager, backend=listen), arguments, dict(kwargs or {}), loss)
    if not graphs:
        raise ValueError(f"fp8compile.explain: {store.NOTHING}")
    return Report(tuple(graphs), str(chosen))


def _chosen(recipe: Recipe | str | None, model: nn.Module) -> Recipe:
    if isinstance(recipe, str):
        return Recipe.preset(recipe)
    if recipe is not None:
        return recipe
    running = store.compiled_for(model)
    return running[-1].recipe if running else Recipe()


def _one_step(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Callable[[Any], Tensor] | None
) -> None:
    output = model(*args, **kwargs)
    scalar = loss(output) if loss else _default_loss(output)
    if scalar is None or not scalar.requires_grad:
        return  # nothing to differentiate: an inference graph
    if scalar.numel() != 1:
        raise ValueError(f"loss must return a scalar, not a tensor of shape {tuple(scalar.shape)}")
    inputs = [t for t in (*model.parameters(), *pytree.tree_leaves((args, kwargs))) if _trains(t)]
    torch.autograd.grad(scalar, inputs, allow_unused=True)


def _trains(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _default_loss(output: Any) -> Tensor | None:
    if isinstance(found := getattr(output, "loss", None), Tensor):
        return found
    leaves = [t for t in pytree.tree_leaves(output) if _trains(t)]
    return sum((t.float().sum() for t in leaves[1:]), leaves[0].float().sum()) if leaves else None


@contextlib.contextmanager
def _left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Buffers, random number generators and the compiled forward of ``model`` are afterwards as they were before."""
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    compiled, model._compiled_call_impl = model._compiled_call_impl, None
    devices = sorted({t.device.index for t in model.parameters() if t.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        model._compiled_call_impl = compiled
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
