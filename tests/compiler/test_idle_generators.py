"""Generators that a graph takes and does not call are None to Inductor; all else is handed on as it is."""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule

from fp8compile.compiler.hooks import lowering_first
from fp8compile.compiler.idle_generators import without_idle_generators
from fp8compile.recipe.recipe import Recipe


def graph_of(calls: bool) -> tuple[GraphModule, list[object]]:
    """A graph of a tensor, a size and a generator, with or without a call of the generator."""
    graph = Graph()
    x, size, generator = (graph.placeholder(name) for name in ("x", "size", "rng"))
    y = graph.call_function(torch.mul, (x, size))
    drawn = graph.call_function(torch.rand, (2,), {"generator": generator}) if calls else y
    graph.output((y, drawn))
    return GraphModule({}, graph), [torch.ones(2), 3, torch.Generator()]


def test_a_generator_that_nothing_calls_is_not_there() -> None:
    gm, inputs = graph_of(calls=False)
    found = without_idle_generators(gm, inputs)
    assert found[:2] == inputs[:2] and found[2] is None


def test_one_that_is_called_stays() -> None:
    gm, inputs = graph_of(calls=True)
    assert without_idle_generators(gm, inputs) == inputs


def test_inputs_that_nothing_reads_stay_too() -> None:
    graph = Graph()
    graph.placeholder("x")
    graph.output(())
    x = torch.ones(2)
    (found,) = without_idle_generators(GraphModule({}, graph), [x])
    assert found is x


def test_inductor_is_given_them_so() -> None:
    given: list[object] = []

    def inner(gm: GraphModule, example_inputs: list[object]) -> None:
        given.extend(example_inputs)

    gm, inputs = graph_of(calls=False)
    lowering_first(inner, Recipe.preset("off"))(gm, inputs)
    assert given[2] is None and len(given) == len(inputs)
