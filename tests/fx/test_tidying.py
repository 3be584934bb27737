"""What a trace leaves in a graph goes; what makes, or may make, another value stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fp8compile.fx.tidying import tidy

aten = torch.ops.aten
X = torch.arange(12.0).reshape(3, 4)


def tidied(fn: Callable[..., Any], *values: Tensor) -> tuple[GraphModule, list[str]]:
    gm = make_fx(fn, tracing_mode="fake")(*values)
    tidy(gm.graph)
    gm.graph.lint()
    gm.recompile()
    return gm, [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize(
    ("fn", "left"),
    [
        (lambda x: aten.alias(x).neg(), ["aten.neg.default"]),
        (lambda x: x.view(3, 4).neg(), ["aten.neg.default"]),
        (lambda x: x.view(12).neg(), ["aten.view.default", "aten.neg.default"]),
        (lambda x: x.view(12).neg() + x.view(12).exp(), ["view", "neg", "exp", "add"]),
        (lambda x: (x + 1) * (x + 1), ["add", "mul"]),
        (lambda x: (x + 1) * (x + 1.0), ["add", "add", "mul"]),
        (lambda x: (x * 0.0) + (x * -0.0), ["mul", "mul", "add"]),
        (lambda x: ((x > 0) + True) * ((x > 0) + 1), ["gt", "add", "add", "mul"]),
        (
            lambda x: torch.where(x > 0, x, torch.nan) + torch.where(x > 0, x, torch.nan),
            ["gt", "scalar", "where"] * 2,
        ),
        (lambda x: torch.rand_like(x) - torch.rand_like(x), ["rand_like", "rand_like", "sub"]),
        (lambda x: aten.neg_(x.clone()) + aten.neg_(x.clone()), ["clone", "neg_", "neg_", "add"]),
    ],
)
def test_what_is_left(fn: Callable[[Tensor], Tensor], left: list[str]) -> None:
    torch.manual_seed(0)
    expected = fn(X)
    gm, ops = tidied(fn, X)
    if "scalar" in left:
        assert [op.split(".")[1] for op in ops].count("scalar_tensor") == 2, "a NaN equals no other"
    else:
        assert len(ops) == len(left) and all(name in op for name, op in zip(left, ops, strict=True))
    if "neg_" not in left:
        torch.manual_seed(0)
        assert torch.equal(gm(X).nan_to_num(), expected.nan_to_num())


def test_results_stay_nodes_of_their_own() -> None:
    """Passes mark them: a result that became an input would put the mark on the input."""
    _, ops = tidied(lambda x: (x.view(3, 4), x + 1, x + 1), X)
    assert ops == ["aten.view.default", "aten.add.Tensor", "aten.add.Tensor"]


def test_a_view_of_symbolic_sizes_stays() -> None:
    gm = make_fx(lambda x: x.view(x.shape[0], 4).neg(), tracing_mode="symbolic")(X)
    tidy(gm.graph)
    assert gm.graph.find_nodes(op="call_function", target=aten.view.default)
