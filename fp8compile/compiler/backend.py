"""The torch.compile backend: ``torch.compile(model, backend="fp8compile", options={...}, mode=...)``."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from fp8compile import _torch as private
from fp8compile.compiler import report_store
from fp8compile.compiler.first_step import checked_first_step
from fp8compile.compiler.inductor import compile_and_report, log
from fp8compile.compiler.inductor_options import inductor_options, mode_options
from fp8compile.compiler.ranks_agree import difference
from fp8compile.compiler.running_model import innermost_type
from fp8compile.compiler.runs import Runs, counted
from fp8compile.compiler.store_check import check_stores_first, prepare_ptxas, ptxas_remarks
from fp8compile.fx.graph import copy_with_attributes
from fp8compile.fx.provenance import parameters_of
from fp8compile.recipe.from_file import recipe_of, remarks_on
from fp8compile.recipe.recipe import Recipe


def fp8compile(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph by Inductor with the recipe's rewrites; torch.compile calls this.

    Args:
        gm: the graph Dynamo captured.
        example_inputs: its inputs.
        options: ``recipe``, a ``fp8compile.Recipe``; or ``preset`` and fields of it. Without options the file that
            FP8COMPILE_RECIPE names is read, if it names one (fp8compile/recipe/from_file.py).
        mode: as in torch.compile; means what it means for Inductor.

    Raises:
        ValueError: an option, preset, mode or value that does not exist. Reaches the user as it is. One that a graph
            brings about is wrapped by torch: the ``inner_exception`` of a BackendCompilerFailed.
    """
    report_store.graph_arrives()  # also where its options are refused
    try:
        recipe = recipe_of(options)
        mode_options(mode), inductor_options(recipe)
    except ValueError as error:
        raise private.RefusedOptions(str(error), sys._getframe()) from None
    return compile_graph(gm, example_inputs, recipe, mode, remarks_on(options))


def compile_graph(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    recipe: Recipe,
    mode: str | None = None,
    remarks: tuple[str, ...] = (),
) -> Callable[..., Any]:
    """``fp8compile`` for a ready recipe: compile, and remember the report, with ``remarks``, for ``report(model)``."""
    report_store.graph_arrives()
    prepare_ptxas(example_inputs)
    parameters = parameters_of(gm, example_inputs)
    own = innermost_type({id(example_inputs[at]) for at, _ in parameters})
    modules, paths = _module_types(gm) | ({own} if own else set()), [path for _, path in parameters]
    spare = copy_with_attributes(gm) if recipe.debug.check == "first_step" else None
    compiled, reports = compile_and_report(gm, example_inputs, recipe, mode)
    if remark := difference(recipe, paths):
        report_store.warn_once(remark)
        remarks += (remark,)
    remarks += ptxas_remarks(example_inputs)
    reports = tuple(dataclasses.replace(report, remarks=report.remarks + remarks) for report in reports)
    runs = Runs(example_inputs)
    compiled = counted(check_stores_first(compiled, example_inputs), runs)
    report_store.remember(reports, recipe, paths, modules, runs)
    log.info("compiled a graph: %s", "; ".join(f"{r.kind}, keeps {r.saved_bytes} bytes" for r in reports))
    if spare is not None:
        return checked_first_step(compiled, spare, example_inputs, recipe)
    return compiled


def _module_types(gm: GraphModule) -> frozenset[type]:
    stacks = (node.meta.get("nn_module_stack") or {} for node in gm.graph.nodes)
    return frozenset(kind for stack in stacks for _, kind in stack.values() if isinstance(kind, type))
