"""torchtitan's graph_trainer: a pass pipeline that rewrites its one graph of forward, loss and backward.

    --compile.pass_pipeline fp8compile --override.imports fp8compile.integrations.torchtitan.optimizers

The override's module calls ``register_pipeline``; a program that names no override calls it itself. FP8COMPILE_RECIPE names a
file with the recipe. Three passes stand among graph_trainer's own, which ``--compile.disable_passes`` knows by their names:

    fp8_linears_pass    behind its cleanup           FP32 islands and FP8 linears
    fp8_saved_pass      behind its memory policy     what that keeps for the backward, as codes
    fp8_regions_pass    before its regional Inductor each run of operations of ours is a region: one kernel, not ten

For our passes the graph is described as a joint graph of AOTAutograd:

    inputs     parameters, buffers, batch               the first ``len(outputs) - 1``, or the module's state, are parameters
    backward   what ``autograd_backward`` marks         it begins at ``ones_like(loss)``, the tangent
    module     ``custom["module_fqn"]``                 of backward nodes that of their forward

What they insert is marked in the same way, since graph_trainer's memory policy goes by these marks. A value that is
overwritten is not saved by autograd, so no operand that the backward encodes again can have changed. FP32 islands are looked
for in graphs that overwrite nothing: theirs is a dataflow analysis.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fp8compile.compiler.pipeline import On, Situation, passes_on
from fp8compile.fx.aot import describe_joint, is_tangent
from fp8compile.fx.graph import SPLICED
from fp8compile.fx.provenance import module_path
from fp8compile.integrations.graph_halves import CannotCut, GraphHalves
from fp8compile.integrations.overwriting import BACKWARD, is_backward, make_functional, overwrites
from fp8compile.integrations.taken_apart import take_apart
from fp8compile.integrations.transformers import summary
from fp8compile.passes.chunk_logits import chunk_logits
from fp8compile.passes.encode_saved import encode_saved
from fp8compile.passes.quantize_linears import quantize_linears
from fp8compile.passes.share_casts import share_casts
from fp8compile.passes.widen_unsafe_ops import widen_unsafe_ops
from fp8compile.recipe.context import Context, Place
from fp8compile.recipe.from_file import recipe_of, remarks_on
from fp8compile.recipe.recipe import Recipe
from fp8compile.reporting.compiled_graph import GraphReport
from fp8compile.reporting.entries import Notes
from fp8compile.reporting.report import Report

_log = logging.getLogger("fp8compile")
aten = torch.ops.aten
NAME = "fp8compile"
PASSES = (widen_unsafe_ops, share_casts, quantize_linears, chunk_logits)  # on a graph that overwrites nothing
ROOT = "fp8compile_begins_backward"  # in the meta of what a tangent stands for
CLEANUP, MEMORY_POLICY, REGIONS = (
    "canonicalize_graph_pass",
    "selective_activation_remat_pass",
    "regional_inductor_pass",
)
NO_BACKWARD = "the graph has no backward that begins at ones_like(loss): nothing was rewritten"
PRECOMPILED = (
    "--compile.precompile_artifact_dir names a graph that was compiled before, which fp8compile cannot rewrite: leave the "
    "option out, or choose another --compile.pass_pipeline"
)
OVERWRITES = "the graph overwrites values: no FP32 islands were looked for"
OFFLOADING = "ao"  # the namespace of operations that move tensors to the CPU and back
OFFLOADS = "graph_trainer moves what it keeps to the CPU: nothing of it is stored as codes"


class Fp8Passes:
    """The three passes for one graph: ``(gm, example_inputs) -> gm`` each.

    Args:
        recipe: by default that of the file which FP8COMPILE_RECIPE names, else the default recipe.
        state: how many inputs, the first, are the module's parameters and buffers; by default as many as have gradients.

    Attributes:
        report: what was done to the graph; None before. Its bytes are those kept for the backward before and after
            ``fp8_saved_pass``, under graph_trainer's memory policy.
    """

    def __init__(self, recipe: Recipe | None = None, state: int | None = None) -> None:
        self.remarks = remarks_on(None) if recipe is None else ()
        self.recipe = recipe_of(None) if recipe is None else recipe
        self.state = state
        self.report: Report | None = None

    def fp8_linears_pass(self, gm: GraphModule, example_inputs: Sequence[Any] | None = None) -> GraphModule:
        """Rewrite linears and islands in place."""
        graph, notes, remarks = gm.graph, Notes(), self.remarks
        make_functional(graph)
        if not (roots := _roots(graph)):
            remarks += (NO_BACKWARD,)
        else:
            writes = any(map(overwrites, graph.nodes))
            remarks += (OVERWRITES,) * writes
            with _as_joint_graph(gm, roots, self.state):
                for each in passes_on(On.JOINT, Situation(self._context, graph)):
                    if each.run in (PASSES[1:] if writes else PASSES):
                        notes += each.run(graph, self._context)
            _mark_as_the_host_does(graph)
        graph.lint()
        gm.recompile()
        self._tell(GraphReport("training", notes, remarks=remarks))
        return gm

    def fp8_saved_pass(self, gm: GraphModule, example_inputs: Sequence[Any] | None = None) -> GraphModule:
        """Store what the graph keeps for its backward as codes."""
        if not (roots := _roots(gm.graph)):
            return gm  # the first pass has said so
        if any(getattr(node.target, "namespace", "") == OFFLOADING for node in gm.graph.nodes):
            self._tell(GraphReport("training", remarks=(OFFLOADS,)))
            return gm
        with _as_joint_graph(gm, roots, self.state) as parameters:
            try:
                self._tell(self._store(gm, parameters))
            except CannotCut as reason:
                self._tell(GraphReport("training", remarks=(str(reason),)))
        _mark_as_the_host_does(gm.graph)
        gm.graph.lint()
        gm.recompile()
        return gm

    def _store(self, gm: GraphModule, parameters: range) -> GraphReport:
        halves = GraphHalves(gm, parameters)
        before = halves.split.saved_bytes()
        take_apart(halves.split.bw.graph)
        notes = encode_saved(halves.split, self._context)
        gm.graph = halves.joined()
        return GraphReport("training", notes, halves.split.saved_bytes(), before)

    def fp8_regions_pass(self, gm: GraphModule, example_inputs: Sequence[Any] | None = None) -> GraphModule:
        """Mark each run of operations of ours as a region of graph_trainer's regional Inductor."""
        region = 0
        for node in gm.graph.nodes:
            if SPLICED in node.meta and node.op == "call_function":
                region += is_backward(node) != is_backward(node.prev) or SPLICED not in node.prev.meta
                compiled = {"compile_with_inductor": {"inductor_region": f"{NAME}_{region}"}}
                node.meta["custom"] = (node.meta.get("custom") or {}) | compiled
        return gm

    @property
    def _context(self) -> Context:
        return Context(self.recipe, is_whole_model=True, place=Place(prefix=""))

    def _tell(self, new: GraphReport) -> None:
        """Add to the report of the graph what a pass has done, and log it."""
        old = self.report.graphs[0] if self.report else GraphReport("training")
        whole = GraphReport(
            "training", old.notes + new.notes, new.saved_bytes, new.saved_bytes_plain, old.remarks + new.remarks
        )
        self.report = Report((whole,), str(self.recipe))
        _log.info("%s", "; ".join((summary(self.report), self.report.recipe, *whole.remarks)))


def register_pipeline(recipe: Recipe | None = None, name: str = NAME) -> None:
    """Make ``--compile.pass_pipeline fp8compile`` graph_trainer's own passes, with ours among them.

    Args:
        recipe: as for ``Fp8Passes``.
        name: the name of the pipeline.

    Raises:
        ValueError: where graph_trainer asks for its passes, if it runs a graph that was compiled before.
    """
    from torchtitan.experiments.graph_trainer.passes import construct_default_graph_passes
    from torchtitan.experiments.graph_trainer.registry import register_pass_pipeline

    @register_pass_pipeline(name)  # type: ignore[untyped-decorator]
    def pipeline(traced: Any, config: Any, **more: Any) -> list[Callable[..., Any]]:
        theirs: list[Callable[..., Any]] = construct_default_graph_passes(traced, config, **more)
        names = [getattr(getattr(each, "func", each), "__name__", "") for each in theirs]
        if CLEANUP not in names:
            raise ValueError(PRECOMPILED)
        ours = Fp8Passes(recipe, traced.num_static_inputs)
        passes: list[Callable[..., Any]] = []
        for each, called in zip(theirs, names, strict=True):
            passes += [ours.fp8_regions_pass] if called == REGIONS else []
            passes.append(each)
            passes += [ours.fp8_linears_pass] if called == CLEANUP else []
            passes += [ours.fp8_saved_pass] if called == MEMORY_POLICY else []
        return passes


def _roots(graph: Graph) -> list[Node]:
    """Where the backward begins: the gradients of losses by themselves."""
    ones = graph.find_nodes(op="call_function", target=aten.ones_like.default)
    return [n for n in ones if not is_backward(n) and n.users and all(map(is_backward, n.users))]


def _mark_as_the_host_does(graph: Graph) -> None:
    """What we inserted belongs to the backward where it reads or follows what does, and to the module of what it is of.

    Codes of a weight belong to the module that reads them: graph_trainer always keeps what goes from one layer to another.
    """
    ours = [node for node in graph.nodes if SPLICED in node.meta and node.op == "call_function"]
    for node in ours:
        if is_backward(node.prev) or any(map(is_backward, node.all_input_nodes)):
            node.meta[BACKWARD] = True
    for node in reversed(ours):
        path = module_path(node) or next((_module(user) for user in node.users), "")
        node.meta["custom"] = {"module_fqn": path} | (node.meta.get("custom") or {})


def _module(node: Node) -> str:
    return str((node.meta.get("custom") or {}).get("module_fqn", ""))


@contextlib.contextmanager
def _as_joint_graph(gm: GraphModule, roots: Sequence[Node], state: int | None) -> Iterator[range]:
    """The graph with the descriptors, module paths and tangents of AOTAutograd's; its inputs are afterwards as before.

    Gives the positions of parameters. Inside, ``gm.graph`` may be replaced by one that is made of copies.
    """
    graph = gm.graph
    primals = graph.find_nodes(op="placeholder")
    for node in graph.nodes:
        if path := _module(node):
            node.meta.setdefault("nn_module_stack", {path: (path, path)})
    for i, root in enumerate(roots):
        with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
            tangent = graph.placeholder(f"tangent_{i}")
        tangent.meta["val"] = root.meta["val"]
        root.replace_all_uses_with(tangent)
        root.meta[ROOT] = i
    tangents = graph.find_nodes(op="placeholder")[len(primals) :]
    trained = len(graph.output_node().args[0]) - 1  # type: ignore[arg-type]  # all outputs but the loss are gradients
    parameters = range(trained if state is None else state)
    describe_joint(graph, primals, tangents, parameters, range(trained))
    try:
        yield parameters
    finally:
        begins = {node.meta.pop(ROOT): node for node in gm.graph.nodes if ROOT in node.meta}
        inputs = gm.graph.find_nodes(op="placeholder")
        for i, tangent in enumerate(filter(is_tangent, inputs)):
            tangent.replace_all_uses_with(begins[i])
            gm.graph.erase_node(tangent)
        for node in (*inputs, gm.graph.output_node()):
            node.meta.pop("desc", None)
