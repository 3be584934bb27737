"""Operations that write into a tensor they were given: who may be made functional, and whom the others concern."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fp8compile.integrations.overwriting import BACKWARD, Writes, make_functional, overwrites

aten = torch.ops.aten


def traced(fn: Callable[..., object]) -> Graph:
    return make_fx(fn, tracing_mode="fake")(torch.rand(4, 6), torch.rand(4, 6)).graph


def named(graph: Graph, target: object) -> Node:
    (node,) = graph.find_nodes(op="call_function", target=target)
    return node


def private_memory(x: Tensor, y: Tensor) -> Tensor:
    return (x * 2).add_(y).t() + 1


def an_input(x: Tensor, y: Tensor) -> Tensor:
    return x.add_(y) + 1


def read_before(x: Tensor, y: Tensor) -> Tensor:
    double = x * 2
    return double.sin() * double.add_(y)


def read_through_a_view(x: Tensor, y: Tensor) -> Tensor:
    double = x * 2
    column = double[:, 0]
    double.add_(y)
    return column + 1


def a_view(x: Tensor, y: Tensor) -> Tensor:
    double = x * 2
    double[0].mul_(3)
    return double + y


@pytest.mark.parametrize(
    ("fn", "stays"),
    [(private_memory, False), (an_input, True), (read_before, True), (read_through_a_view, True), (a_view, True)],
)
def test_what_nobody_else_sees_is_made_functional(fn: Callable[..., Tensor], stays: bool) -> None:
    graph = traced(fn)
    assert any(map(overwrites, graph.nodes))
    make_functional(graph)
    assert any(map(overwrites, graph.nodes)) is stays
    x, y = torch.rand(4, 6), torch.rand(4, 6)
    ours = torch.fx.GraphModule({}, graph)(x.clone(), y)
    assert torch.equal(ours, fn(x.clone(), y))


def test_an_operation_without_a_functional_twin_stays() -> None:
    graph = traced(lambda x, y: torch.sin(x, out=torch.empty(4, 6)) + y)
    make_functional(graph)
    assert any(map(overwrites, graph.nodes))


def test_what_is_computed_from_overwritten_memory_is_touched() -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        double = x * 2
        first, before = double[0], y.sin()
        double[1].mul_(y[1])
        return first.exp(), before

    graph = traced(fn)
    touched = Writes(graph).touched
    assert {named(graph, target) in touched for target in (aten.mul.Tensor, aten.mul_.Tensor, aten.exp.default)} == {
        True
    }
    assert named(graph, aten.sin.default) not in touched


def test_a_buffer_that_gradients_are_written_into_is_one() -> None:
    def fn(gradient: Tensor, y: Tensor) -> Tensor:
        whole, other = torch.zeros_like(y), torch.ones_like(y)
        whole[:2].copy_(gradient.neg()[:2])
        other[0].copy_(y[0])
        return whole.cos() + other.sin()

    graph = traced(fn)
    named(graph, aten.neg.default).meta[BACKWARD] = True
    gradients = Writes(graph).gradients
    assert {named(graph, aten.zeros_like.default), named(graph, aten.neg.default)} <= gradients
    assert not gradients & {named(graph, aten.ones_like.default), named(graph, aten.sin.default)}
