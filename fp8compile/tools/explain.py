"""What was done to a model: ``explain`` compiles it afresh, ``report`` describes the model that is running."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fp8compile import _torch as private
from fp8compile.compiler import report_store
from fp8compile.compiler.inductor import compile_and_report
from fp8compile.compiler.running_model import unwrapped
from fp8compile.compiler.runs import Instance, Runs, counted, in_last_step
from fp8compile.fx.provenance import beginning, module_names, parameter_names, parameters_of
from fp8compile.optim.placement import fixed_formats
from fp8compile.recipe.recipe import Recipe
from fp8compile.reporting.compiled_graph import GraphReport
from fp8compile.reporting.kernel import Kernel
from fp8compile.reporting.memory import gradient_bytes, model_bytes
from fp8compile.reporting.report import Report
from fp8compile.tools.compiled_module import active_recipes, compiled_by, compiled_inside
from fp8compile.tools.trial_step import (
    LIMIT,
    as_positional,
    check_is_module,
    check_needs_no_batch,
    chosen_recipe,
    left_as_it_was,
    one_step,
)
from fp8compile.tools.unmatched import unmatched, without_wishes
from fp8compile.tools.without_memory import is_on_meta, without_memory
from fp8compile.whole_step.step import TrainStep

OTHER_RECIPE = " for the recipe that runs now"
PLAIN_EAGER = (
    "it runs as plain eager, because Dynamo has compiled this code as often as it does (recompile_limit, "
    "accumulated_recompile_limit of torch._dynamo.config); raise the limit, or call torch._dynamo.reset()"
)


def report(compiled: nn.Module | TrainStep) -> Report:
    """The report of the graphs compiled so far for a model, as returned by torch.compile or compiled in place; or of those of
    a ``train_step``.

    After ``set_recipe``, these are only the graphs of the recipe that runs now.

    Raises:
        ValueError: no graph of this model was compiled by fp8compile, so there is nothing to report; or it is no module.
    """
    if isinstance(compiled, TrainStep):
        return compiled.report()
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
    return _report(found, found[-1].recipe, compiled)


def explain(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    recipe: Recipe | str | Mapping[str, Any] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    *,
    kernels: bool = False,
) -> Report:
    """What fp8compile does to ``model``: one forward and backward on a fresh compilation, without generating kernels.

    A model whose blocks are compiled each by itself is compiled in the same blocks, with the recipe of the first.

    Gradients, buffers and random number generators are left as they were; a model that is compiled goes on as it was.
    A model on the meta device is explained too, without memory for it: as if on this machine's GPU, or else on its CPU.

    Args:
        model: a module, compiled or not.
        args: positional example arguments.
        kwargs: keyword example arguments.
        recipe: a Recipe, the name of a preset or a dict of fields; by default that of the running model, else the
            default recipe.
        loss: the scalar to differentiate, from the model's output; by default ``output.loss`` where there is one,
            else the sum of the floating-point outputs.
        kernels: generate kernels all the same, and list them (``graphs[i].kernels``, the page's table); takes a compilation.

    Raises:
        ValueError: no graph was compiled, ``loss`` is not a scalar, or ``model`` is no module or partly on the meta device.
    """
    check_is_module(model, "explain")
    eager, positional, named = getattr(model, "_orig_mod", model), as_positional(args), dict(kwargs or {})
    if is_on_meta(model):
        if kernels:
            raise ValueError(
                "explain(kernels=True) runs what it generates, and a model on the meta device has no memory"
            )
        mode = private.FakeTensorMode()
        copied = without_memory(eager, positional, named, mode)
        with mode:
            return explain(*copied, recipe=chosen_recipe(recipe, model), loss=loss)
    if not positional and not named:
        check_needs_no_batch(eager, "explain")
    blocks = compiled_inside(model)
    chosen = chosen_recipe(recipe, blocks[0] if blocks else model)
    graphs: list[report_store.Compiled] = []
    listed: list[list[Kernel]] = []

    def listen(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        runs, paths = Runs(example_inputs), tuple(path for _, path in parameters_of(gm, example_inputs))
        found: list[Kernel] = []
        compiled, reports = compile_and_report(
            gm, example_inputs, chosen, generate=kernels, keep_steps=True, kernels=found
        )
        graphs.append(report_store.Compiled(reports, chosen, frozenset(), paths, runs=runs))
        listed.append(found)
        return counted(compiled, runs)

    limit = torch._dynamo.config.patch(recompile_limit=LIMIT)
    with left_as_it_was(eager), compiled_by(listen, blocks), limit:
        one_step(eager if blocks else torch.compile(eager, backend=listen), positional, named, loss)
    if not graphs:
        raise ValueError(f"fp8compile.explain: {report_store.NO_GRAPH_COMPILED}")
    return _report([_with_kernels(*each) for each in zip(graphs, listed, strict=True)], chosen, eager)


def _with_kernels(compiled: report_store.Compiled, kernels: Sequence[Kernel]) -> report_store.Compiled:
    """The compilation with its kernels in the first of its reports; they are known when its backward has run."""
    first, *others = compiled.reports
    return dataclasses.replace(compiled, reports=(dataclasses.replace(first, kernels=tuple(kernels)), *others))


def _places(
    graph: report_store.Compiled, names: Mapping[int, Sequence[str]], counts: Mapping[Instance, int] | None
) -> tuple[tuple[str, int], ...]:
    """Where a graph stands in the model with these parameters, and how often it ran there in the last step.

    Before its first step each instance counts once. What ran in the step on parameters of another model does not count.
    """
    instances = graph.runs.instances
    own = [i for i in instances if not graph.paths or i.alive & names.keys()]
    places = []
    for instance in own or instances:
        paths = {id(ref()): path for ref, path in zip(instance.parameters, graph.paths, strict=True)}
        places.append((beginning(paths, names) or "", 1 if counts is None else counts[instance]))
    return tuple(places)


def _placed(report: GraphReport, places: tuple[tuple[str, int], ...]) -> GraphReport:
    """The report of a graph at its places; a graph that saves nothing counts once in any case."""
    if report.kind != "training":
        places = tuple((path, 1) for path, _ in places[:1])
    return dataclasses.replace(report, runs=sum(times for _, times in places), places=places)


def _report(graphs: Sequence[report_store.Compiled], recipe: Recipe, model: nn.Module) -> Report:
    """The report of a model from those of its graphs."""
    eager = unwrapped(model)
    gradients = [gradient_bytes(ref() for ref in c.runs.first.parameters) for c in graphs]
    counts, names = in_last_step([c.runs for c in graphs]), parameter_names(eager)
    reports = [_placed(r, _places(c, names, counts)) for c in graphs for r in c.reports]
    remarks = unmatched(reports, recipe, eager)
    reports = [without_wishes(report) for report in reports]
    reports[0] = dataclasses.replace(reports[0], remarks=reports[0].remarks + remarks)
    modules = frozenset(module_names(eager).values())
    return Report(tuple(reports), str(recipe), model_bytes(eager, fixed_formats(eager), gradients), modules)
