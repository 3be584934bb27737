"""torchtitan's graph_trainer: a pass pipeline that rewrites its one graph of forward, loss and backward.

    --compile.pass_pipeline fp8compile --override.imports fp8compile.integrations.torchtitan.optimizers

The override's module calls ``register_pipeline``; a program that names no override calls it itself. FP8COMPILE_RECIPE names a
file with the recipe.

    inputs     parameters, buffers, batch               the first len(outputs) - 1 are the parameters that train
    backward   what ``autograd_backward`` marks         it begins at ``ones_like(loss)``
    module     ``custom["module_fqn"]``                 of backward nodes that of their forward

For our passes the graph is described as a joint graph of AOTAutograd: ``ones_like(loss)`` becomes an input, the tangent, and
again what it was when they have run. FP8 linears and FP32 islands are placed. What is kept for the backward is left to
graph_trainer's own memory policy: no partitioner cuts this graph, so there is no list of saved tensors to store as codes.

A value that an operation overwrites is not saved by autograd, so no operand that the backward encodes again can have changed.
FP32 islands are looked for in graphs without such operations only: theirs is a dataflow analysis.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fp8compile.compiler.pipeline import ISLANDS, JOINT
from fp8compile.fx.aot import describe_joint
from fp8compile.integrations.transformers import summary
from fp8compile.recipe.context import Context, Place
from fp8compile.recipe.from_file import recipe_of, remarks_on
from fp8compile.recipe.recipe import Recipe
from fp8compile.reporting.entries import Notes
from fp8compile.reporting.report import GraphReport, Report

_log = logging.getLogger("fp8compile")
aten = torch.ops.aten
NAME = "fp8compile"
AFTER = "canonicalize_graph_pass"
NO_BACKWARD = "the graph has no backward that begins at ones_like(loss): nothing was rewritten"
NOT_CUT = "graph_trainer's graph is not cut in two: what it keeps for the backward is not stored as codes"
PRECOMPILED = (
    "--compile.precompile_artifact_dir names a graph that was compiled before, which fp8compile cannot rewrite: leave the "
    "option out, or choose another --compile.pass_pipeline"
)
OVERWRITES = "the graph overwrites values: no FP32 islands were looked for"


class Fp8Pass:
    """A graph_trainer pass: ``(gm, example_inputs) -> gm``.

    Args:
        recipe: by default that of the file which FP8COMPILE_RECIPE names, else the default recipe.

    Attributes:
        report: what was done to the last graph; None before.
    """

    __name__ = "fp8compile_pass"

    def __init__(self, recipe: Recipe | None = None) -> None:
        self.remarks = (NOT_CUT, *(remarks_on(None) if recipe is None else ()))
        self.recipe = recipe_of(None) if recipe is None else recipe
        self.report: Report | None = None

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any] | None = None) -> GraphModule:
        """Rewrite the graph in place, and log what was done."""
        graph, notes, remarks = gm.graph, Notes(), self.remarks
        roots = _roots(graph)
        passes = JOINT if _overwrites(graph) else ISLANDS + JOINT
        if _overwrites(graph):
            remarks += (OVERWRITES,)
        if not roots:
            remarks += (NO_BACKWARD,)
        else:
            with _as_joint_graph(graph, roots):
                for each in passes:
                    notes += each.run(graph, Context(self.recipe, is_whole_model=True, place=Place(prefix="")))
        graph.lint()
        gm.recompile()
        self.report = Report((GraphReport("training", notes, remarks=remarks),), str(self.recipe))
        _log.info("%s", "; ".join((summary(self.report), self.report.recipe, *remarks)))
        return gm


def register_pipeline(recipe: Recipe | None = None, name: str = NAME) -> None:
    """Make ``--compile.pass_pipeline fp8compile`` graph_trainer's own passes, with ours behind its cleanup.

    Args:
        recipe: as for ``Fp8Pass``.
        name: the name of the pipeline.

    Raises:
        ValueError: where graph_trainer asks for its passes, if it runs a graph that was compiled before.
    """
    from torchtitan.experiments.graph_trainer.passes import construct_default_graph_passes
    from torchtitan.experiments.graph_trainer.registry import register_pass_pipeline

    @register_pass_pipeline(name)  # type: ignore[untyped-decorator]
    def pipeline(traced: Any, config: Any, **more: Any) -> list[Callable[..., Any]]:
        passes: list[Callable[..., Any]] = construct_default_graph_passes(traced, config, **more)
        names = [getattr(getattr(each, "func", each), "__name__", "") for each in passes]
        if AFTER not in names:
            raise ValueError(PRECOMPILED)
        return [*passes[: (at := names.index(AFTER) + 1)], Fp8Pass(recipe), *passes[at:]]


def _is_backward(node: Node) -> bool:
    return bool(node.meta.get("autograd_backward"))


def _roots(graph: Graph) -> list[Node]:
    """Where the backward begins: the gradients of losses by themselves."""
    ones = graph.find_nodes(op="call_function", target=aten.ones_like.default)
    return [n for n in ones if not _is_backward(n) and n.users and all(map(_is_backward, n.users))]


def _overwrites(graph: Graph) -> bool:
    schemas = (getattr(node.target, "_schema", None) for node in graph.nodes)
    return any(schema is not None and schema.is_mutable for schema in schemas)


@contextlib.contextmanager
def _as_joint_graph(graph: Graph, roots: Sequence[Node]) -> Iterator[None]:
    """The graph with the descriptors, module paths and tangents of AOTAutograd's; its inputs are afterwards as before."""
    primals = graph.find_nodes(op="placeholder")
    for node in graph.nodes:
        if path := (node.meta.get("custom") or {}).get("module_fqn"):
            node.meta.setdefault("nn_module_stack", {path: (path, path)})
    tangents: list[Node] = []
    for i, root in enumerate(roots):
        with graph.inserting_after(([*primals, *tangents])[-1]):
            tangents.append(graph.placeholder(f"tangent_{i}"))
        tangents[-1].meta["val"] = root.meta["val"]
        root.replace_all_uses_with(tangents[-1])
    trained = len(graph.output_node().args[0]) - 1  # type: ignore[arg-type]  # all outputs but the loss are gradients
    describe_joint(graph, primals, tangents, range(trained))
    try:
        yield
    finally:
        for root, tangent in zip(roots, tangents, strict=True):
            tangent.replace_all_uses_with(root)
            graph.erase_node(tangent)
        for node in (*primals, graph.output_node()):
            node.meta.pop("desc", None)
