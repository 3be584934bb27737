"""A Dynamo graph compiled once under a recipe: Inductor with our passes, and the reports."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from fp8compile import _torch as private
from fp8compile.compiler import report_store
from fp8compile.compiler.apart import compiled_apart
from fp8compile.compiler.cache_key import key_of
from fp8compile.compiler.code_kernels import with_known_blocks
from fp8compile.compiler.cpu_vectors import vectors_of
from fp8compile.compiler.dump import watch_for
from fp8compile.compiler.generated_memory import noting_peaks, stored_peaks
from fp8compile.compiler.group_kernels import with_groups_held
from fp8compile.compiler.hooks import lowering_first, passes_for
from fp8compile.compiler.inductor_options import inductor_options, makes_cuda_graphs, mode_options, our_options
from fp8compile.compiler.inline_regions import DIFFERS, OBSERVED, WHOLE, has_regions, inlined, recipes_differ
from fp8compile.compiler.kernels import listing
from fp8compile.compiler.loop_loads import with_loads_in_loops
from fp8compile.compiler.near_kernels import BETWEEN_TWO, WITHIN_A_LAYER, with_near_kernels
from fp8compile.compiler.node_by_node import run_nothing, run_the_graph
from fp8compile.compiler.place_guard import guard_place
from fp8compile.compiler.rare_collections import with_rare_collections
from fp8compile.compiler.row_kernels import with_tiles_for_codes
from fp8compile.compiler.running_model import as_registered, place_of
from fp8compile.compiler.saved_versions import check_versions
from fp8compile.compiler.tile_scales import with_scales_of_tiles
from fp8compile.compiler.watchers import watch_passes, watched_then_too
from fp8compile.fx.graph import copy_with_attributes
from fp8compile.fx.regions import find_regions
from fp8compile.linears.slot import WithScales, operands_of, with_scales
from fp8compile.linears.smooth_swiglu import may_smooth
from fp8compile.linears.weight_slot import WeightCodes, with_weight_codes
from fp8compile.observe.slot import WithStatsInputs, rows_of, with_slot
from fp8compile.recipe.calibrated import check_calibration
from fp8compile.recipe.calibration import Calibration
from fp8compile.recipe.context import Context
from fp8compile.recipe.recipe import Recipe
from fp8compile.reporting.compiled_graph import GraphReport
from fp8compile.reporting.kernel import Kernel
from fp8compile.reporting.running import GeneratedPeaks

log = logging.getLogger("fp8compile")

NOTHING_TO_DELAY = (
    "Recipe.linears.scaling='delayed' has no effect: Recipe.linears.mode is 'off', so that no linear has a scale"
)

NOTHING_TO_CACHE = (
    "Recipe.linears.cache_weights has no effect: weights are cached where Recipe.linears.mode is 'tensorwise'"
)
NOTHING_TO_MERGE = (
    "Recipe.linears.merge_dgrads has no effect without FP8 linears, scaling='delayed' and cache_weights=True"
)
NOTHING_TO_SMOOTH = (
    "Recipe.linears.smooth_swiglu has no effect: it is for FP8 linears with mode='tensorwise', scaling='dynamic' and "
    "cache_weights=False"
)
NO_CUDA_GRAPHS = (
    "Recipe.linears.cache_weights is ignored: CUDA graphs would copy the codes of all weights in each call; another mode "
    "than 'reduce-overhead' and 'max-autotune' caches them"
)
NOTHING_TO_OFFLOAD = (
    "Recipe.memory.offload has no effect: nothing is stored as codes, since 'linears' is 'off', and 'saved' is 'off' or "
    "'exact'"
)
NO_CUDA_GRAPHS_ON_HOST = (
    "Recipe.memory.offload is ignored: a CUDA graph cannot hold copies to the host; another mode than 'reduce-overhead' and "
    "'max-autotune' makes them"
)

ALREADY_QUANTIZED = (
    "Inductor's activation_quantization_aten_pass is on; fp8compile does not stack on it and keeps tensors as they are. "
    "Remove it from post_grad_fusion_options to store them as fp8compile does"
)


def compile_and_report(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    recipe: Recipe,
    mode: str | None = None,
    *,
    generate: bool = True,
    keep_steps: bool = False,
    kernels: list[Kernel] | None = None,
) -> tuple[Callable[..., Any], tuple[GraphReport, ...]]:
    """The compiled callable of a Dynamo graph and what was done to it.

    ``generate=False`` makes the same rewrites and then runs the graph node by node, whatever the recipe says.
    ``keep_steps`` keeps each pass with the graph before and after it, all of them in the first report.
    ``kernels`` takes the kernels that are generated, as they come: those of a backward when it first runs.
    """
    watch = watch_for(recipe, keep_steps)
    inner = None if generate else run_the_graph
    if generate and kernels is not None:
        inner = listing(kernels)
    if watch is None:
        return compile_once(gm, example_inputs, recipe, mode, inner)[:2]
    spare = copy_with_attributes(gm)
    with watch_passes(watch):
        compiled, reports, cached = compile_once(gm, example_inputs, recipe, mode, inner)
        dumped = reports
        if cached and watch.folder:  # no pass ran: compile once more, for the dump alone
            again: Any = run_the_graph if recipe.debug.codegen == "eager" else private.compile_fx_inner
            with compiled_apart(), private.functorch_config.patch(force_non_lazy_backward_lowering=True):
                _, dumped, _ = compile_once(spare, example_inputs, recipe, mode, again)
    watch.report(dumped, recipe)
    return compiled, (dataclasses.replace(reports[0], steps=tuple(watch.steps)), *reports[1:])


@with_rare_collections
def compile_once(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    recipe: Recipe,
    mode: str | None = None,
    inner_compile: Callable[..., Any] | None = None,
    measures_saved: bool = False,
) -> tuple[Callable[..., Any], tuple[GraphReport, ...], bool]:
    """The compiled callable, the reports, and whether it came from a cache; ``inner_compile`` stands for Inductor's own.

    With ``measures_saved`` what would be stored as codes stays exact and is marked (passes/mark_saved.py).
    """
    patches = {**mode_options(mode), **inductor_options(recipe)}
    recipe, remarks = _resolve_conflicts(recipe, patches)
    if isinstance(recipe.fp32.islands, Calibration):
        check_calibration(recipe.fp32.islands, recipe)
    inner = inner_compile or (run_the_graph if recipe.debug.codegen == "eager" else None)
    place = place_of(gm, example_inputs)
    ctx = Context(recipe, place=place)
    guard_place(gm, example_inputs, ctx)
    ctx = dataclasses.replace(ctx, is_whole_model=_is_whole_model(gm, recipe) and not place.prefix)
    gm, inputs, ctx, inlining = _prepared(gm, example_inputs, ctx)
    generates = recipe.rewrites_graph and inner is not run_the_graph
    vectors = vectors_of(inputs, patches) if generates else {}
    patches = {**our_options(recipe), **vectors, **patches}
    parameters = frozenset(i for i, v in enumerate(inputs) if isinstance(v, torch.nn.Parameter))
    ctx = dataclasses.replace(ctx, parameters=parameters, measures_saved=measures_saved)
    spare = copy_with_attributes(gm) if ctx.scale_input else gm
    compiled, reports, cached = _through_inductor(gm, inputs, ctx, patches, inner)
    reports = tuple(dataclasses.replace(r, remarks=r.remarks + remarks + inlining) for r in reports)
    codes = WeightCodes(reports, ctx.weight_inputs, ctx.packed_inputs, recipe)
    compiled = codes.given_to(compiled)
    if ctx.scale_input:
        measuring = dataclasses.replace(ctx, scale_input=dataclasses.replace(ctx.scale_input, known=False))
        with compiled_apart(), watch_passes(None):  # the same passes, on the same graph
            measures, measured, _ = _through_inductor(spare, inputs, measuring, patches, run_the_graph)
        operands = operands_of(reports)
        assert [o.place_of_row for o in operands] == [o.place_of_row for o in operands_of(measured)], (
            "both graphs are one graph, rewritten in one order"
        )
        compiled = WithScales(compiled, codes.given_to(measures), operands, ctx.scale_input, recipe, example_inputs)
    if ctx.stats_inputs:
        compiled = WithStatsInputs(compiled, ctx.stats_inputs, rows_of(reports), example_inputs, as_registered)
    return compiled, reports, cached


def with_our_kernels(inner: Callable[..., Any], recipe: Recipe) -> Callable[..., Any]:
    """An inner compiler of Inductor that makes kernels as a recipe's may be: of short forms, with what belongs in one."""
    if inner in (run_the_graph, run_nothing):
        return inner
    inner = with_known_blocks(
        with_groups_held(with_tiles_for_codes(with_scales_of_tiles(with_loads_in_loops(inner))))
    )
    if not recipe.rewrites_graph:
        return inner
    return lowering_first(with_near_kernels(inner, BETWEEN_TWO if recipe.limits_memory else WITHIN_A_LAYER), recipe)


def _through_inductor(
    gm: GraphModule,
    inputs: Sequence[Any],
    ctx: Context,
    patches: Mapping[str, Any],
    inner: Callable[..., Any] | None,
) -> tuple[Callable[..., Any], tuple[GraphReport, ...], bool]:
    """A Dynamo graph that has all its inputs through Inductor with our passes; reports; whether it came from a cache."""
    if inner is not None:
        patches = {**patches, "force_disable_caches": True}  # the cache key does not know the inner compiler
    generates = inner is not run_the_graph
    inner = watched_then_too(with_rare_collections(with_our_kernels(inner or private.compile_fx_inner, ctx.recipe)))
    if ctx.recipe.offloads:
        private.transfers()  # code from a cache calls them, and then no pass has loaded them
    graph_key = key_of(gm, inputs, ctx, patches)
    patches = {**patches, **passes_for(ctx, graph_key, patches, find_regions(gm, ctx.parameters))}
    peaks = GeneratedPeaks()
    if generates and not ctx.recipe.offloads:  # what waits on the host is in the text too
        file = functools.partial(report_store.path_of, folder="fp8compile-peaks")
        peaks = stored_peaks(functools.partial(file, graph_key))
        inner = noting_peaks(inner, peaks, graph_key, file)
    report_store.start(graph_key)
    spare = copy_with_attributes(gm) if ctx.has_own_inputs else gm
    through: Callable[..., Any] = functools.partial(private.compile_fx, inner_compile=inner)
    compiled = through(gm, inputs, config_patches=patches)
    if ctx.has_own_inputs and report_store.is_lost(graph_key):
        compiled = through(spare, inputs, config_patches={**patches, "force_disable_caches": True})
    cached = report_store.came_from_cache(graph_key)
    reports = report_store.finish(graph_key)
    if len(reports) == 1:
        reports = (dataclasses.replace(reports[0], generated=peaks),)
    return check_versions(compiled, reports), reports, cached


def _prepared(
    gm: GraphModule, example_inputs: Sequence[Any], ctx: Context
) -> tuple[GraphModule, Sequence[Any], Context, tuple[str, ...]]:
    """The graph to compile with its inputs, fp8compile's own among them, their context, and a remark where
    its regions are inlined."""
    if not has_regions(gm):
        return (*_with_own_inputs(gm, example_inputs, ctx), ())
    flat = inlined(gm)
    slotted, inputs, own_ctx = _with_own_inputs(flat, example_inputs, ctx)
    if own_ctx.has_own_inputs:
        return slotted, inputs, own_ctx, (OBSERVED,)
    if ctx.recipe.offloads:
        return flat, inputs, ctx, (WHOLE,)
    return (flat, inputs, ctx, (DIFFERS,)) if recipes_differ(gm, ctx) else (gm, inputs, ctx, ())


def _with_own_inputs(
    gm: GraphModule, inputs: Sequence[Any], ctx: Context
) -> tuple[GraphModule, Sequence[Any], Context]:
    gm, inputs, stats_inputs = with_slot(gm, inputs, ctx.recipe)
    gm, inputs, scale_input = with_scales(gm, inputs, ctx.recipe)
    gm, inputs, weight_inputs, packed_inputs = with_weight_codes(gm, inputs, ctx.recipe)
    ctx = dataclasses.replace(ctx, stats_inputs=stats_inputs, scale_input=scale_input)
    ctx = dataclasses.replace(ctx, weight_inputs=weight_inputs, packed_inputs=packed_inputs)
    return gm, inputs, ctx


def _resolve_conflicts(recipe: Recipe, patches: Mapping[str, Any]) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe as far as it can be followed, and remarks on the requests that cannot be followed."""
    remarks = []
    fusion = {**private.inductor_config.post_grad_fusion_options, **patches.get("post_grad_fusion_options", {})}
    if "activation_quantization_aten_pass" in fusion and recipe.stores_saved:
        recipe = recipe.replace_in_all({"saved": "off"})
        remarks.append(ALREADY_QUANTIZED)
    if recipe.linears.scaling == "delayed" and not recipe.quantizes_linears:
        remarks.append(NOTHING_TO_DELAY)
    if recipe.linears.cache_weights and not recipe.caches_weights:
        remarks.append(NOTHING_TO_CACHE)
    if recipe.caches_weights and makes_cuda_graphs(patches):
        recipe = recipe.replace_in_all({"linears.cache_weights": False})
        remarks.append(NO_CUDA_GRAPHS)
    if recipe.offloads and not (recipe.rounds_saved or recipe.quantizes_linears):
        recipe = recipe.replace_in_all({"memory.offload": "off"})
        remarks.append(NOTHING_TO_OFFLOAD)
    if recipe.offloads and makes_cuda_graphs(patches):
        recipe = recipe.replace_in_all({"memory.offload": "off"})
        remarks.append(NO_CUDA_GRAPHS_ON_HOST)
    if recipe.linears.merge_dgrads and not recipe.merges_dgrads:
        remarks.append(NOTHING_TO_MERGE)
    if recipe.linears.smooth_swiglu and not may_smooth(recipe):
        remarks.append(NOTHING_TO_SMOOTH)
    for remark in remarks:
        report_store.warn_once(remark)
    return recipe, tuple(remarks)


_broken: set[str] = set()  # keys of recipes that have compiled a graph that ends at a graph break


def _is_whole_model(gm: GraphModule, recipe: Recipe) -> bool:
    """Whether a Dynamo graph is a whole model: no graph break ends it, and it cannot be what follows a graph break."""
    if private.ends_at_graph_break(gm):
        _broken.add(recipe.key)
    return recipe.key not in _broken
