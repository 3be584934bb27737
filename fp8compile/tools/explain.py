"""What was done to a model: ``explain`` compiles it afresh, ``report`` describes the model that is running."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fp8compile.compiler import report_store
from fp8compile.compiler.inductor import compile_and_report
from fp8compile.compiler.runs import in_last_step
from fp8compile.optim.placement import fixed_formats
from fp8compile.recipe.recipe import Recipe
from fp8compile.reporting.memory import gradient_bytes, model_bytes
from fp8compile.reporting.report import GraphReport, Report
from fp8compile.tools.compiled_module import active_recipes
from fp8compile.tools.trial_step import LIMIT, check_is_module, chosen_recipe, left_as_it_was, one_step
from fp8compile.tools.unmatched import unmatched, without_wishes

OTHER_RECIPE = " for the recipe that runs now"
PLAIN_EAGER = (
    "it runs as plain eager, because Dynamo has compiled this code as often as it does (recompile_limit, "
    "accumulated_recompile_limit of torch._dynamo.config); raise the limit, or call torch._dynamo.reset()"
)


def report(compiled: nn.Module) -> Report:
    """The report of the graphs compiled so far for a model, as returned by torch.compile or compiled in place.

    After ``set_recipe``, these are only the graphs of the recipe that runs now.

    Raises:
        ValueError: no graph of this model was compiled by fp8compile, so there is nothing to report; or it is no module.
    """
    check_is_module(compiled, "report")
    recipes = active_recipes(compiled)
    known = report_store.compiled_for(compiled)
    found = [c for c in known if not recipes or c.recipe in recipes]
    if not found:
        raise ValueError(
            f"no graph of this {type(compiled).__name__} was compiled by fp8compile"
            f"{OTHER_RECIPE if known else ''}. If it has not run yet, run one step first. If it has: "
            f"{PLAIN_EAGER if known else report_store.NO_GRAPH_COMPILED}"
        )
    gradients = [gradient_bytes(ref() for ref in c.parameters) for c in found]
    runs = [1 if times is None else times for times in in_last_step([c.runs for c in found])]
    ran = [_ran(r, times) for c, times in zip(found, runs, strict=True) for r in c.reports]
    return _report(ran, found[-1].recipe, compiled, gradients)


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
        ValueError: no graph was compiled, ``loss`` is not a scalar, or ``model`` is no module.
    """
    check_is_module(model, "explain")
    eager = getattr(model, "_orig_mod", model)
    chosen = chosen_recipe(recipe, model)
    graphs: list[tuple[GraphReport, ...]] = []
    calls: list[int] = []
    gradients: list[int] = []

    def listen(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled, reports = compile_and_report(gm, example_inputs, chosen, generate=False, keep_steps=True)
        graphs.append(reports)
        calls.append(0)
        gradients.append(gradient_bytes(example_inputs))
        return _counted(compiled, calls, len(calls) - 1)

    arguments = (args,) if isinstance(args, Tensor) else tuple(args)
    with left_as_it_was(eager), torch._dynamo.config.patch(recompile_limit=LIMIT):
        one_step(torch.compile(eager, backend=listen), arguments, dict(kwargs or {}), loss)
    if not graphs:
        raise ValueError(f"fp8compile.explain: {report_store.NO_GRAPH_COMPILED}")
    ran = [_ran(r, times) for reports, times in zip(graphs, calls, strict=True) for r in reports]
    return _report(ran, chosen, eager, gradients)


def _ran(report: GraphReport, times: int) -> GraphReport:
    """The report of a graph that ran ``times`` times; a graph that saves nothing counts once in any case."""
    return dataclasses.replace(report, runs=times if report.kind == "training" else 1)


def _counted(run: Callable[..., Any], calls: list[int], at: int) -> Callable[..., Any]:
    """``run``, counting its calls in ``calls[at]``."""

    def run_and_count(*args: Any) -> Any:
        calls[at] += 1
        return run(*args)

    return run_and_count


def _report(graphs: list[GraphReport], recipe: Recipe, model: nn.Module, gradients: list[int]) -> Report:
    """The report of a model; ``gradients`` are the bytes of gradients that each graph makes."""
    eager = getattr(model, "_orig_mod", model)
    remarks = unmatched(graphs, recipe, eager)
    graphs = [without_wishes(graph) for graph in graphs]
    graphs[0] = dataclasses.replace(graphs[0], remarks=graphs[0].remarks + remarks)
    modules = frozenset(path for path, _ in eager.named_modules())
    return Report(tuple(graphs), str(recipe), model_bytes(eager, fixed_formats(eager), gradients), modules)
