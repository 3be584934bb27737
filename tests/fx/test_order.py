"""What is made of parameters alone stands directly before what reads it first."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx import Graph, Node

from fp8compile.analysis.liveness import needs
from fp8compile.fx.order import sink_weights
from tests.support.graphs import split_of

aten = torch.ops.aten


def graph_of(*calls: tuple[str, object, tuple[str, ...]], output: tuple[str, ...]) -> tuple[Graph, dict[str, Node]]:
    """A graph with the inputs ``w`` and ``x`` and calls: name, operator, names of operands."""
    graph = Graph()
    nodes = {name: graph.placeholder(name) for name in ("w", "x")}
    for name, target, operands in calls:
        nodes[name] = graph.create_node("call_function", target, tuple(nodes[o] for o in operands), name=name)  # type: ignore[arg-type]
    graph.output(tuple(nodes[name] for name in output))
    return graph, nodes


def names(graph: Graph) -> list[str]:
    return [node.name for node in graph.nodes if node.op == "call_function"]


ABS, NEG, MM = aten.abs.default, aten.neg.default, aten.mm.default


def test_a_chain_moves_to_its_first_reader_in_its_order() -> None:
    graph, nodes = graph_of(
        ("a", ABS, ("w",)), ("b", NEG, ("a",)), ("y", NEG, ("x",)), ("m", MM, ("y", "b")), ("n", MM, ("m", "b")),
        output=("n",),
    )  # fmt: skip
    for _ in range(2):  # the second changes nothing
        sink_weights(graph, {nodes["w"]})
        graph.lint()
        assert names(graph) == ["y", "a", "b", "m", "n"]


def test_what_only_the_output_reads_stays_and_with_it_what_it_reads() -> None:
    graph, nodes = graph_of(
        ("a", ABS, ("w",)), ("kept", NEG, ("a",)), ("y", NEG, ("x",)), ("m", MM, ("y", "a")), output=("m", "kept")
    )
    sink_weights(graph, {nodes["w"]})
    graph.lint()
    assert names(graph) == ["a", "kept", "y", "m"]


def test_a_constant_goes_with_what_reads_it() -> None:
    graph, nodes = graph_of(
        ("one", aten.scalar_tensor.default, ()), ("a", aten.add.Tensor, ("w", "one")), ("y", NEG, ("x",)),
        ("m", MM, ("y", "a")), output=("m",),
    )  # fmt: skip
    sink_weights(graph, {nodes["w"]})
    assert names(graph) == ["y", "one", "a", "m"]


@pytest.mark.parametrize(
    ("target", "operands"),
    [
        (aten.neg_.default, ("x",)),  # a graph that writes
        (torch.ops._c10d_functional.all_reduce.default, ("w",)),  # ranks have to agree on the order
    ],
)
def test_order_that_matters_stays(target: object, operands: tuple[str, ...]) -> None:
    graph, nodes = graph_of(("c", target, operands), ("y", NEG, ("x",)), ("m", MM, ("y", "c")), output=("m",))
    if target is aten.neg_.default:
        with graph.inserting_before(nodes["c"]):
            nodes["a"] = graph.call_function(ABS, (nodes["w"],))
        nodes["m"].args = (nodes["c"], nodes["a"])
    before = names(graph)
    sink_weights(graph, {nodes["w"]})
    assert names(graph) == before


def test_the_codes_of_weights_are_not_alive_together() -> None:
    def needed(layers: int) -> int:
        model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(layers)))
        options = {"saved": "off", "linears.emulate": True, "debug.codegen": "eager"}
        return needs(split_of(model, torch.randn(16, 128), **options)).workspace

    assert needed(8) - needed(2) < 128 * 128 * 4
