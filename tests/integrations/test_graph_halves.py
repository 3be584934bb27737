"""One graph cut in two and put together again: the same numbers, and no cut where it could not be argued for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fp8compile.fx.aot import describe_joint
from fp8compile.fx.ops import is_view
from fp8compile.integrations import graph_halves
from fp8compile.integrations.graph_halves import CannotCut, GraphHalves
from fp8compile.integrations.overwriting import BACKWARD
from tests.integrations.one_graph import Block, step_of

aten = torch.ops.aten


def halves_of(gm: GraphModule) -> GraphHalves:
    inputs = gm.graph.find_nodes(op="placeholder")
    trained = range(len(gm.graph.output_node().args[0]) - 1)  # type: ignore[arg-type]
    describe_joint(gm.graph, inputs, [], trained, trained)
    return GraphHalves(gm, trained)


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_put_together_it_computes_the_same(mode: str) -> None:
    torch.manual_seed(0)
    gm, inputs = step_of(nn.Sequential(Block(8), Block(8)), torch.randn(3, 8), mode=mode)
    expected = gm(*inputs)
    halves = halves_of(gm)
    assert halves.split.saved_bytes() and not any(is_view(edge.forward) for edge in halves.split.edges)
    whole = halves.joined()
    whole.lint()
    found = GraphModule(gm, whole)(*inputs)
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))
    assert [n.name for n in whole.find_nodes(op="placeholder")] == [
        n.name for n in gm.graph.find_nodes(op="placeholder")
    ]


def test_the_gradient_of_a_loss_in_chunks_comes_in_as_a_tangent() -> None:
    """Its backward comes before the last forward node, and it is gathered in a buffer that is written into."""

    class Chunks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            gathered, total = torch.zeros_like(x), x.new_zeros(())
            for i, part in enumerate(x.detach().chunk(2)):
                with torch.enable_grad():
                    value = part.requires_grad_().sin().square().sum()
                gathered.chunk(2)[i].copy_(torch.autograd.grad(value, part)[0])
                total = total + value.detach()
            ctx.save_for_backward(gathered)
            return total

        @staticmethod
        def backward(ctx: Any, *gradient: Tensor) -> Tensor:
            return gradient[0] * ctx.saved_tensors[0]

    gm, inputs = step_of(Block(8), torch.randn(4, 8), lambda model, x: Chunks.apply(model(x)))
    ends = gm.graph.find_nodes(op="call_function", target=aten.ones_like.default)[-1]
    for node in gm.graph.nodes:
        node.meta[BACKWARD] = node > ends or node.target is aten.cos.default
    inputs = [
        t.detach() for t in inputs
    ]  # torch 2.15 traces enable_grad, under which a view must not be written into
    expected, halves = gm(*inputs), halves_of(gm)
    assert not any("zeros_like" in edge.forward.name for edge in halves.split.edges)
    assert all(map(torch.equal, GraphModule(gm, halves.joined())(*inputs), expected))


def overwritten_in_the_forward(model: Callable[..., Tensor], x: Tensor) -> Tensor:
    y = model(x)
    with torch.no_grad():
        y[0].mul_(2)
    return y.detach().sin().mul(model(x)).sum()


def overwritten_in_the_backward(model: Callable[..., Tensor], x: Tensor) -> Tensor:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor) -> Tensor:
            return y.clone()

        @staticmethod
        def backward(ctx: Any, *gradient: Tensor) -> Tensor:
            doubled = gradient[0].clone()
            doubled[0].mul_(2)
            return doubled

    return Twice.apply(model(x)).square().sum()  # type: ignore[no-any-return,no-untyped-call]


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (overwritten_in_the_forward, "made from memory that the graph overwrites"),
        (overwritten_in_the_backward, "the backward overwrites values in mul_"),
    ],
)
def test_a_graph_that_overwrites_what_matters_is_not_cut(loss: Any, reason: str) -> None:
    gm, _ = step_of(Block(8), torch.randn(4, 8), loss)
    before = str(gm.graph)
    with pytest.raises(CannotCut, match=reason):
        halves_of(gm)
    assert str(gm.graph) == before


def test_a_part_of_a_tuple_that_is_taken_in_the_backward_alone() -> None:
    gm, _ = step_of(Block(8), torch.randn(4, 8))
    (norm,) = gm.graph.find_nodes(op="call_function", target=aten.native_layer_norm.default)
    begins = next(n for n in gm.graph.nodes if n.meta.get(BACKWARD))
    for part in [n for n in norm.users if n.args[1] > 0]:
        begins.prepend(part)
        part.meta[BACKWARD] = True
    with pytest.raises(CannotCut, match="the backward reads native_layer_norm, neither tensors nor sizes"):
        halves_of(gm)


def test_a_graph_that_ends_in_its_forward_is_not_cut() -> None:
    gm, _ = step_of(Block(8), torch.randn(4, 8))
    list(gm.graph.nodes)[-2].meta[BACKWARD] = False
    with pytest.raises(CannotCut) as raised:
        halves_of(gm)
    assert str(raised.value) == graph_halves.ENDS_BEFORE
