"""Inductor's hooks, which run the pipeline: joint passes, the partitioner, passes behind Inductor's own.

Every pass runs inside Inductor's GraphTransformObserver, so ``TORCHINDUCTOR_DISABLED_PASSES=encode_saved`` switches it off
by name; a disabled pass leaves the graph as it found it. The hooks are part of Inductor's cache key: each can be pickled, and
its ``uuid`` depends on the sources, the recipe and, where a report belongs to the graph, the graph.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch.fx import Graph, GraphModule

from fp8compile import _torch as private
from fp8compile.compiler.graph_picture import picture_of
from fp8compile.compiler.graph_report import report_of
from fp8compile.compiler.graph_waterfall import recomputed_by_cut
from fp8compile.compiler.idle_generators import without_idle_generators
from fp8compile.compiler.named_passes import observed, watched, with_theirs
from fp8compile.compiler.pipeline import On, Pass, Situation, passes_on
from fp8compile.compiler.region_reports import Cut
from fp8compile.compiler.report_store import JointNotes, collecting
from fp8compile.compiler.sources import sources_key
from fp8compile.compiler.watchers import is_watched
from fp8compile.fx.checkpointed import join_regions
from fp8compile.fx.graph import copy_graph
from fp8compile.fx.partition import PartitionedGraph
from fp8compile.fx.regions import NOT_DESCRIBED, Region, describe, is_described, is_half, mark_halves, storages
from fp8compile.passes.cut_for_bytes import cut_for_bytes
from fp8compile.recipe.context import Context
from fp8compile.recipe.recipe import Recipe
from fp8compile.reporting.entries import Notes
from fp8compile.saved.allowance import OF_GAIN

REPORT = "fp8compile.report"  # what a report alone asks for, in torch's compile_times()


class Halves(NamedTuple):
    """The halves of a training graph behind all passes, and how many results the forward has beside what it keeps."""

    fw: GraphModule
    bw: GraphModule
    own_results: int


_takers: list[list[Halves]] = []


@contextlib.contextmanager
def taking_halves() -> Iterator[list[Halves]]:
    """Inside, a copy of the halves of each graph that is cut is added to the list; regions are left out."""
    taken: list[Halves] = []
    _takers.append(taken)
    try:
        yield taken
    finally:
        _takers.remove(taken)


class Partitioner(private.CustomPartitionerFn):
    """Inductor's custom partitioner: cut, then the passes on two halves. Stateless, since it is part of the cache key."""

    def __init__(self, ctx: Context, graph_key: str) -> None:
        self.ctx, self.recipe, self.graph_key = ctx, ctx.recipe, graph_key

    def __reduce__(self) -> tuple[Any, ...]:
        return Partitioner, (self.ctx.as_compiled, self.graph_key)

    def uuid(self) -> tuple[str, str, str]:
        return sources_key(), self.recipe.key, self.graph_key

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        collector = collecting(self.graph_key)
        joint = collector.joint.pop(gm.graph, None) or JointNotes(copy_graph(gm))
        with private.dynamo_timed(REPORT):
            halves = _upstream(joint.plain, joint_inputs, **kwargs)
        if not is_described(gm.graph):
            collector.remarks.append(NOT_DESCRIBED)
            return halves
        if joint.region is not None:
            kwargs["static_lifetime_input_indices"] = sorted(joint.region.parameters)
        plain = _split(*halves, **kwargs)
        split, disabled = self._cut(gm, joint_inputs, **kwargs)
        split.to_spend_us = OF_GAIN * sum(each.us_in_its_dtype - each.us for each in joint.notes.linears)
        ctx = self.ctx if joint.region is None else self.ctx.of_region
        notes = recomputed_by_cut(split, plain, joint.notes)
        bytes_after = [(cut_for_bytes.__name__, split.saved_bytes())]
        situation = Situation(ctx, split.fw.graph, bool(joint.notes.observed), bool(split.overwritten))
        passes = passes_on(On.HALVES, situation)
        for each in passes:
            ran = observed(split.fw, each.name, functools.partial(each.run, split, ctx), split)
            disabled += [] if ran is not None else [each.name]
            notes += ran or Notes()
            bytes_after.append((each.name, split.saved_bytes()))
        if passes:
            # Delayed scales: counts of a weight are taken with its codes.
            split.finish(sinks_weights=self.recipe.rewrites_graph and not self.ctx.scale_input)
        remarks = tuple(
            f"{name} is switched off by TORCHINDUCTOR_DISABLED_PASSES" for name in (*joint.disabled, *disabled)
        )
        with private.dynamo_timed(REPORT):
            report = report_of(split, plain, joint.notes + notes, bytes_after, remarks, collector)
        if is_watched():
            report = dataclasses.replace(report, picture=picture_of(split, plain, joint.notes + notes))
        if joint.region is None:
            collector.add(report)
            for taken in _takers:
                taken.append(Halves(copy_graph(split.fw), copy_graph(split.bw), kwargs["num_fwd_outputs"]))
        else:
            collector.cuts[split.fw.graph] = Cut(joint.region, report, storages(plain))
            mark_halves(split.fw, split.bw, kwargs["num_fwd_outputs"])
        return split.fw, split.bw

    def _cut(
        self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[PartitionedGraph, list[str]]:
        """The two halves, by our cut where the recipe rewrites anything, and the names of passes that are off."""
        halves, disabled = None, list[str]()
        for each in passes_on(On.CUT, Situation(self.ctx, gm.graph)):
            halves = observed(gm, each.name, functools.partial(each.run, gm, joint_inputs, kwargs))
            disabled += [] if halves else [each.name]
        return _split(*(halves or _upstream(gm, joint_inputs, **kwargs)), **kwargs), disabled


class JointPasses(private.CustomGraphPass):
    """Inductor's joint_custom_post_pass: runs JOINT, on training and inference graphs alike.

    ``ctx`` is their context; ``graph_key`` depends on it too.
    """

    def __init__(self, ctx: Context, graph_key: str, regions: Mapping[str, Region] | None = None) -> None:
        self.ctx, self.recipe, self.graph_key, self.regions = ctx, ctx.recipe, graph_key, dict(regions or {})

    def __reduce__(self) -> tuple[Any, ...]:
        return JointPasses, (self.ctx.as_compiled, self.graph_key, self.regions)

    def uuid(self) -> tuple[str, str, str]:
        return sources_key(), self.recipe.key, self.graph_key

    def __call__(self, graph: Graph) -> None:
        collector = collecting(self.graph_key)
        collector.compiled = True
        gm = graph.owning_module
        assert gm is not None
        if is_half(gm):
            return
        private.stable_topological_sort(graph)  # Inductor sorts after this hook, not before
        region = describe(graph, self.regions)
        plain, notes, disabled = copy_graph(gm), Notes(), []
        ctx = self.ctx.of_region if region else self.ctx
        written = set(graph.nodes)
        for each in passes_on(On.JOINT, Situation(ctx, graph)):
            ran = observed(gm, each.name, functools.partial(each.run, graph, ctx))
            disabled += [] if ran is not None else [each.name]
            notes += ran or Notes()
        join_regions(graph, written)
        collector.joint[graph] = JointNotes(plain, notes, tuple(disabled), region)


class OnOneGraph(private.CustomGraphPass):
    """Passes on one graph as a hook of Inductor's, with nothing to report."""

    on: On

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.recipe.as_compiled,)

    def uuid(self) -> tuple[str, str]:
        return sources_key(), self.recipe.key

    def __call__(self, graph: Graph) -> None:
        _run_all(self.on, graph, self.recipe)


def _run_all(on: On, graph: Graph, recipe: Recipe) -> bool:
    """Runs the passes of a stage that have nothing to report; whether there are any."""
    gm, ctx = graph.owning_module, Context(recipe)
    assert gm is not None
    passes = passes_on(on, Situation(ctx, graph))
    for each in passes:
        watched(gm, each.name, functools.partial(_run, each, graph, ctx))
    return bool(passes)


def _run(each: Pass, graph: Graph, ctx: Context) -> Notes:
    """Runs a pass that has nothing to report."""
    each.run(graph, ctx)
    return Notes()


class BeforePatterns(OnOneGraph):
    """Inductor's joint_custom_pre_pass."""

    on = On.PATTERNS


def lowering_first(inner_compile: Callable[..., Any], recipe: Recipe) -> Callable[..., Any]:
    """An inner compiler of Inductor that is given graphs behind the passes on LOWERING.

    They run before Inductor's own post-grad passes, which compute the values of what is new behind them once more.
    """

    @functools.wraps(inner_compile)
    def compiled(gm: GraphModule, example_inputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        if _run_all(On.LOWERING, gm.graph, recipe):
            gm.recompile()  # Inductor's cache asks for the code
        return inner_compile(gm, without_idle_generators(gm, example_inputs), *args, **kwargs)

    return compiled


class PostGradPasses(OnOneGraph):
    """Inductor's post_grad_custom_post_pass."""

    on = On.POST_GRAD


def passes_for(
    ctx: Context, graph_key: str, patches: Mapping[str, Any], regions: Mapping[str, Region] | None = None
) -> dict[str, Any]:
    """The Inductor options that put the pipeline in place; the user's own passes keep running, before ours."""
    if patches.get("custom_partitioner_fn") or private.inductor_config.custom_partitioner_fn:
        raise ValueError(
            "Inductor's custom_partitioner_fn is set, and fp8compile is a partitioner itself: one graph cannot be cut by "
            "two. Unset it, or compile this model with another backend"
        )
    return {
        **with_theirs("joint_custom_pre_pass", BeforePatterns(ctx.recipe), patches),
        **joint_pass(JointPasses(ctx, graph_key, regions), patches),
        **with_theirs("post_grad_custom_post_pass", PostGradPasses(ctx.recipe), patches),
        "custom_partitioner_fn": Partitioner(ctx, graph_key),
    }


def joint_pass(ours: Callable[[Graph], None], patches: Mapping[str, Any]) -> dict[str, Any]:
    """The Inductor option that runs ``ours`` on joint and inference graphs, after the user's own."""
    return with_theirs("joint_custom_post_pass", ours, patches)


def _upstream(gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> tuple[GraphModule, GraphModule]:
    fw, bw = private.min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
    return fw, bw


def _split(fw: GraphModule, bw: GraphModule, **kwargs: Any) -> PartitionedGraph:
    fw, bw = (private.LazyGraphModule.from_graphmodule(half) for half in (fw, bw))  # no code for what is changed yet
    return PartitionedGraph(fw, bw, kwargs["num_fwd_outputs"], kwargs.get("static_lifetime_input_indices") or [])
