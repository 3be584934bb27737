"""The halves that the pipeline makes of a model, caught on their way to Inductor, and a short text of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fp8compile.compiler.hooks import JointPasses
from fp8compile.fx.graph import SPLICED, copy_graph
from fp8compile.fx.partition import PartitionedGraph
from tests.support.measure import compiled


def split_of(model: nn.Module, *args: Tensor, disabled: str = "", **options: Any) -> PartitionedGraph:
    """Forward and backward graph of ``model`` after the PARTITION passes (but for those ``disabled``)."""
    caught: list[PartitionedGraph] = []
    finish = PartitionedGraph.finish

    def catch(self: PartitionedGraph, **options: Any) -> None:
        finish(self, **options)
        caught.append(self)

    recipe = {"saved.min_numel": 0, **options}
    with mock.patch.object(PartitionedGraph, "finish", catch), torch._inductor.config.patch(disabled_passes=disabled):
        compiled(model, **recipe)(*args)
    return caught[0]


def joint_of(model: nn.Module, *args: Tensor, **options: Any) -> Graph:
    """Joint graph of ``model`` after the JOINT passes."""
    caught: list[Graph] = []
    run = JointPasses.__call__

    def catch(self: JointPasses, graph: Graph) -> None:
        run(self, graph)
        graph.eliminate_dead_code()
        assert graph.owning_module is not None
        caught.append(copy_graph(graph.owning_module).graph)

    with mock.patch.object(JointPasses, "__call__", catch):
        compiled(model, **{"saved.min_numel": 0, **options})(*args)
    return caught[0]


def traced(
    fn: Callable[..., Any],
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
) -> GraphModule:
    """``fn`` as a graph, traced on fake tensors of these shapes: no GPU is needed."""
    with FakeTensorMode():
        args = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
        gm: GraphModule = make_fx(fn)(*args)
    return gm


def text_of(graph: Graph) -> str:
    """One short line a node: name: dtype[shape] = op(arguments); layout and scalar arguments left out.

    What was spliced in is one line, ``results = function(values)``: the function has tests of its own.
    """
    lines: list[str] = []
    for node in graph.nodes:
        spliced = node.meta.get(SPLICED)
        if spliced and any(user.meta.get(SPLICED) != spliced for user in node.users):
            name = f"{node.name}: {_kind(node)} = {spliced}"
            lines.append(name)
        elif not spliced and node.op != "output":
            lines.append(_line(node))
    return "\n".join([*lines, _returned(graph), ""])


def backward_of(split: PartitionedGraph) -> str:
    return text_of(split.bw.graph)


def forward_of(split: PartitionedGraph) -> str:
    return text_of(split.fw.graph)


def _kind(node: Node) -> str:
    value = node.meta.get("val")
    return f"{str(value.dtype)[6:]}{list(value.shape)}" if isinstance(value, Tensor) else ""


def _line(node: Node) -> str:
    kind = _kind(node)
    if node.op == "placeholder":
        return f"{node.name}: {kind}"
    op = re.sub(r"^(aten|prims)\.|\.(default|Tensor|Scalar|self)$", "", str(node.target))
    arguments = ", ".join(str(a) for a in node.args if isinstance(a, (Node, float, torch.dtype)))
    return f"{node.name}: {kind} = {op}({arguments})"


def _returned(graph: Graph) -> str:
    values: Any = graph.output_node().args[0]
    return "return " + ", ".join(str(v) for v in values)
