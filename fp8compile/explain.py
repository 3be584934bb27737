"""What was done to a model: ``explain`` compiles afresh and tells, ``report`` tells of the model that is running."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from fp8compile import store
from fp8compile.backend import compile_and_report
from fp8compile.memory import model_bytes
from fp8compile.module_recipes import in_module
from fp8compile.recipe import Recipe
from fp8compile.report import GraphReport, Report
from fp8compile.running import recipes_running, running

UNMATCHED = (
    "Recipe.modules[{!r}]: no tensor in this report was made in such a module. Where a graph breaks inside a module, Dynamo "
    "compiles that module by itself: its paths begin there, and one graph serves every module of that class"
)
OTHER_RECIPE = " for the recipe that runs now"
PLAIN_EAGER = (
    "it runs as plain eager, because Dynamo has compiled this code as often as it does (recompile_limit, "
    "accumulated_recompile_limit of torch._dynamo.config); raise the limit, or call torch._dynamo.reset()"
)
LIMIT = 1024  # explain compiles the same code once more for every recipe; Dynamo's usual limit is 8


def report(compiled: nn.Module) -> Report:
    """The report of the graphs compiled so far for a model, as returned by torch.compile or compiled in place.

    After ``set_recipe``, only those of the recipe that runs now.

    Raises:
        ValueError: no graph of this model was compiled by fp8compile, so there is nothing to report.
    """
    recipes = recipes_running(compiled)
    known = store.compiled_for(compiled)
    found = [c for c in known if not recipes or c.recipe in recipes]
    if not found:
        raise ValueError(
            f"no graph of this {type(compiled).__name__} was compiled by fp8compile"
            f"{OTHER_RECIPE if known else ''}. If it has not run yet, run one step first. If it has: "
            f"{PLAIN_EAGER if known else store.NOTHING}"
        )
    return _report([r for c in found for r in c.reports], found[-1].recipe, compiled)


def explain(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    recipe: Recipe | str | Mapping[str, Any] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
) -> Report:
    """What fp8compile does to ``model``: one forward and backward on a fresh compilation, without generating kernels.

    Gradients, buffers and random number generators are left as they were; a model that is compiled goes on as it was.

    Args:
        model: a module, compiled or not.
        args: positional example arguments.
        kwargs: keyword example arguments.
        recipe: a Recipe, the name of a preset or a dict of fields; by default that of the running model, else the
            default recipe.
        loss: the scalar to differentiate, from the model's output; by default ``output.loss`` where there is one,
            else the sum of the floating-point outputs.

    Raises:
        ValueError: no graph was compiled, or ``loss`` is not a scalar.
    """
    eager = getattr(model, "_orig_mod", model)
    chosen = _chosen(recipe, model)
    graphs: list[tuple[GraphReport, ...]] = []
    calls: list[int] = []

    def listen(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled, reports = compile_and_report(gm, example_inputs, chosen, generate=False, keep_steps=True)
        graphs.append(reports)
        calls.append(0)
        return _counted(compiled, calls, len(calls) - 1)

    arguments = (args,) if isinstance(args, Tensor) else tuple(args)
    with _left_as_it_was(eager), torch._dynamo.config.patch(recompile_limit=LIMIT):
        _one_step(torch.compile(eager, backend=listen), arguments, dict(kwargs or {}), loss)
    if not graphs:
        raise ValueError(f"fp8compile.explain: {store.NOTHING}")
    ran = [dataclasses.replace(r, runs=runs) for reports, runs in zip(graphs, calls, strict=True) for r in reports]
    return _report(ran, chosen, eager)


def _counted(run: Callable[..., Any], calls: list[int], at: int) -> Callable[..., Any]:
    """``run``, counting its calls in ``calls[at]``."""

    def run_and_count(*args: Any) -> Any:
        calls[at] += 1
        return run(*args)

    return run_and_count


def _report(graphs: list[GraphReport], recipe: Recipe, model: nn.Module) -> Report:
    remarks = tuple(UNMATCHED.format(pattern) for pattern in recipe.modules if not _matches(graphs, pattern))
    graphs[0] = dataclasses.replace(graphs[0], remarks=graphs[0].remarks + remarks)
    return Report(tuple(graphs), str(recipe), model=model_bytes(model))


def _matches(graphs: list[GraphReport], pattern: str) -> bool:
    """Whether any tensor or linear of these reports is in a module that ``pattern`` matches."""
    told = Report(tuple(graphs))
    origins = [entry.origin for part in (told.saved, told.skips, told.recomputed, told.linears) for entry in part]
    return any(in_module(origin.module, pattern) for origin in origins)


def _chosen(recipe: Recipe | str | Mapping[str, Any] | None, model: nn.Module) -> Recipe:
    if recipe is not None:
        return Recipe.made_from(recipe, Recipe())
    if (found := running(model)) is not None:
        return found.recipe
    ran = store.compiled_for(model)
    return ran[-1].recipe if ran else Recipe()


def _one_step(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Callable[[Any], Tensor] | None
) -> tuple[Tensor | None, ...]:
    """The gradients of the parameters that train, then of the arguments that do."""
    output = model(*args, **kwargs)
    scalar = loss(output) if loss else _default_loss(output)
    if scalar is None or not scalar.requires_grad:
        return ()  # nothing to differentiate: an inference graph
    if scalar.numel() != 1:
        raise ValueError(f"loss must return a scalar, not a tensor of shape {tuple(scalar.shape)}")
    inputs = [t for t in (*model.parameters(), *pytree.tree_leaves((args, kwargs))) if _trains(t)]
    return torch.autograd.grad(scalar, inputs, allow_unused=True)


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
