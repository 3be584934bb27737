"""recomputed: which values of the forward a backward has again, by what makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from fp8compile.analysis.recomputed import recomputed
from fp8compile.fx.graph import is_size, is_tensor
from fp8compile.fx.partition import PartitionedGraph
from tests.support.graphs import split_of

aten = torch.ops.aten
Make = Callable[[Graph, Node], Node]


def halves(early: Make, late: Make) -> bool:
    """Whether a value of the backward is found to be one of the forward: each made by a function of a saved one."""
    fw, bw = Graph(), Graph()
    x, used = fw.placeholder("x"), bw.placeholder("x")
    x.meta["val"] = used.meta["val"] = torch.zeros(4, 4)
    made, again = early(fw, x), late(bw, used)
    fw.output((made, x))
    bw.output((again,))
    split = PartitionedGraph(GraphModule({}, fw), GraphModule({}, bw), 1, [])
    return recomputed(split).get(again) is made


def calls(op: Any, *args: object) -> Make:
    return lambda graph, x: graph.call_function(op, tuple(x if a == "x" else a for a in args))


def plus(op: Any, *args: object) -> Make:
    """A value plus one that is made of no value."""
    return lambda graph, x: graph.call_function(aten.add.Tensor, (x, graph.call_function(op, args)))


SAME = {
    "an operation": calls(aten.mul.Tensor, "x", 2.0),
    "NaN": calls(aten.mul.Tensor, "x", float("nan")),
    "a list": calls(aten.view.default, "x", [2, 8]),
    "a constant": plus(aten.full.default, [4], 3.0),
}
OTHER = {
    "another number": (calls(aten.mul.Tensor, "x", 2.0), calls(aten.mul.Tensor, "x", 3.0)),
    "a number of another type": (calls(aten.mul.Tensor, "x", 2.0), calls(aten.mul.Tensor, "x", 2)),
    "another shape": (calls(aten.view.default, "x", [2, 8]), calls(aten.view.default, "x", [8, 2])),
    "a longer list": (calls(aten.view.default, "x", [16]), calls(aten.view.default, "x", [16, 1])),
    "another constant": (plus(aten.full.default, [4], 3.0), plus(aten.full.default, [4], 2.0)),
    "other random numbers": (plus(aten.rand.default, [4]), plus(aten.rand.default, [4])),
    "random numbers like it": (calls(aten.rand_like.default, "x"), calls(aten.rand_like.default, "x")),
}


def twins(op: Any, *args: object) -> bool:
    """Whether the second of two constants of the forward that are alike is found, where the backward has one."""
    fw, bw = Graph(), Graph()
    x, used = fw.placeholder("x"), bw.placeholder("x")
    x.meta["val"] = used.meta["val"] = torch.zeros(4, 4)
    first = fw.call_function(aten.mul.Tensor, (x, fw.call_function(op, args)))
    made = fw.call_function(aten.add.Tensor, (x, fw.call_function(op, args)))
    again = bw.call_function(aten.add.Tensor, (used, bw.call_function(op, args)))
    fw.output((first, made, x))
    bw.output((again,))
    split = PartitionedGraph(GraphModule({}, fw), GraphModule({}, bw), 2, [])
    return recomputed(split).get(again) is made


@pytest.mark.parametrize("number", [3.0, float("nan")])
def test_a_constant_is_known_by_its_value(number: float) -> None:
    """A forward has a NaN for each scale: none is merged with another, since a NaN equals only itself."""
    assert twins(aten.scalar_tensor.default, number)
    assert twins(aten.full.default, [4], number)


@pytest.mark.parametrize(
    ("op", "args"), [(aten.rand.default, ([4],)), (torch.ops.prims.inductor_seeds.default, (4, torch.device("cpu")))]
)
def test_what_is_made_of_nothing_may_still_differ(op: Any, args: tuple[Any, ...]) -> None:
    """Random numbers that are saved are not others that the same operation draws."""
    fw, bw = Graph(), Graph()
    x, used, saved = fw.placeholder("x"), bw.placeholder("x"), bw.placeholder("saved")
    x.meta["val"] = used.meta["val"] = torch.zeros(4, 4)
    drawn, others = (fw.call_function(op, args) for _ in range(2))
    made = fw.call_function(aten.add.Tensor, (x, others))
    again = bw.call_function(aten.add.Tensor, (used, saved))
    fw.output((made, x, drawn))
    bw.output((again,))
    split = PartitionedGraph(GraphModule({}, fw), GraphModule({}, bw), 1, [])
    assert recomputed(split).get(saved) is drawn and again not in recomputed(split)


@pytest.mark.parametrize("name", SAME)
def test_what_does_the_same_is_found(name: str) -> None:
    assert halves(SAME[name], SAME[name])


@pytest.mark.parametrize("name", OTHER)
def test_what_does_not_is_not(name: str) -> None:
    assert not halves(*OTHER[name])


@pytest.mark.parametrize("dynamic", [False, True])
def test_all_that_a_backward_makes_of_saved_values_is_found_behind_views(dynamic: bool) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.gain = nn.Linear(64, 128), nn.Linear(128, 64), nn.Parameter(torch.ones(128))

        def forward(self, x: Tensor) -> Tensor:
            return self.b(nn.functional.rms_norm(self.a(x) * self.gain, (128,)))

    torch._dynamo.reset()
    with torch._dynamo.config.patch(assume_static_by_default=not dynamic):
        split = split_of(Scaled(), torch.randn(6, 40, 64), disabled="encode_saved", linears="off")
    found = recomputed(split)
    tangents = [n for n in split.bw.graph.find_nodes(op="placeholder") if n.name.startswith("tangents")]
    assert dynamic == any(is_size(n) for n in split.bw.graph.nodes)
    assert all(n in found for n in split.bw.graph.nodes if is_size(n))
    of_forward = [
        n for n in split.bw.graph.nodes if is_tensor(n) and n.name in {e.name for e in split.fw.graph.nodes}
    ]
    assert len(of_forward) >= 9 and not found.keys() & set(tangents)
    assert all(found[n].name == n.name for n in of_forward), "the cut keeps names, which nothing but this test reads"
