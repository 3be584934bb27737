"""The backward's order: what depends on no gradient stands before what reads it first."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from fp8compile.fx.aot import describe_backward
from fp8compile.fx.order import sink_recomputed


def order_of(backward: Callable[[Tensor, Tensor, Tensor], Tensor]) -> list[str]:
    """The operations of ``backward(a, b, tangent)`` after the pass; its result is what it was."""
    values = [torch.full((4, 4), float(n)) for n in (1, 2, 3)]
    gm = make_fx(backward)(*values)
    describe_backward(gm.graph, gm.graph.find_nodes(op="placeholder")[2:], [])
    torch.manual_seed(0)
    before = gm(*values)
    sink_recomputed(gm.graph)
    gm.graph.lint()
    gm.recompile()
    torch.manual_seed(0)
    assert torch.equal(before, gm(*values))
    return operations(gm.graph)


def operations(graph: Graph) -> list[str]:
    return [str(n.target).split(".")[1] for n in graph.nodes if n.op == "call_function"]


def test_what_is_made_again_waits_for_its_first_reader() -> None:
    """sin, cos and exp depend on no tangent; cos is read by exp, which the second product reads, and by no one before."""

    def backward(a: Tensor, b: Tensor, tangent: Tensor) -> Tensor:
        first, second = a.sin(), b.cos().exp()
        gradient = tangent.neg() * first
        return gradient.abs() * second

    assert order_of(backward) == ["neg", "sin", "mul", "abs", "cos", "exp", "mul"]


def test_what_several_read_stands_before_the_first_of_them() -> None:
    def backward(a: Tensor, b: Tensor, tangent: Tensor) -> Tensor:
        shared = a.sin()
        later = shared.cos()
        return (tangent.neg() * shared).abs() * later

    assert order_of(backward) == ["neg", "sin", "mul", "abs", "cos", "mul"]


def test_random_numbers_are_drawn_where_they_were() -> None:
    def backward(a: Tensor, b: Tensor, tangent: Tensor) -> Tensor:
        drawn, again = torch.rand_like(a), torch.rand_like(b)
        return tangent.neg() * again + drawn

    assert order_of(backward)[:3] == ["rand_like", "rand_like", "neg"]


def test_a_graph_that_writes_keeps_its_order() -> None:
    def backward(a: Tensor, b: Tensor, tangent: Tensor) -> Tensor:
        read = a.sin()
        written = tangent.neg().add_(1)
        return written * read

    assert order_of(backward) == ["sin", "neg", "add_", "mul"]
