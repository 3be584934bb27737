"""softmax_dim: every form in which a softmax stands in a graph, and what only looks like one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import Graph

from fp8compile._torch import make_fx, select_decomp_table
from fp8compile.analysis.softmax import softmax_dim

aten = torch.ops.aten


def found(fn: Callable[[Tensor], Tensor], decomposed: bool = True, symbolic: bool = False) -> int | None:
    table = select_decomp_table() if decomposed else {}
    mode = "symbolic" if symbolic else "fake"
    graph: Graph = make_fx(fn, decomposition_table=table, tracing_mode=mode)(torch.randn(4, 6, 8)).graph
    return softmax_dim(graph.output_node().args[0])  # type: ignore[arg-type]


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    return torch.softmax(x, dim)


def rows(x: Tensor) -> Tensor:
    return (x > 9).any(-1, keepdim=True)


FORMS = {
    "last": (lambda x: softmax(x), 2),
    "middle": (lambda x: softmax(x, 1), 1),
    "in 16 bit": (lambda x: softmax(x.bfloat16()), 2),
    "in FP32, rounded": (lambda x: torch.softmax(x.bfloat16(), -1, dtype=torch.float32).bfloat16(), 2),
    "permuted": (lambda x: softmax(x).permute(2, 0, 1), 0),
    "transposed": (lambda x: softmax(x).transpose(0, 1), 2),
    "heads in the batch": (lambda x: softmax(x).reshape(2, 2, 6, 8).reshape(12, 2, 8), 2),
    "a dimension more": (lambda x: softmax(x, 1).unsqueeze(1), 2),
    "repeated": (lambda x: softmax(x).unsqueeze(0).expand(3, 4, 6, 8), 3),
    "safe": (lambda x: aten._safe_softmax(x, -1), 2),
    "rows of zeros": (lambda x: torch.where(rows(x), softmax(x), 0.0), 2),
    "zeros first, one mask for all heads": (lambda x: torch.where(rows(x[0]), 0.0, softmax(x)), 2),
    "one choice for each column": (lambda x: torch.where((x > 0).all(0), softmax(x, 0), 0.0), 0),
    "by hand": (
        lambda x: x.exp() / x.exp().sum(-1, keepdim=True),
        None,
    ),  # two exponentials: not one value in this graph
    "by hand, one exponential": (lambda x: (e := x.exp()) / e.sum(-1, keepdim=True), 2),
}
NOT = {
    "dropped out": lambda x: softmax(x) * (x > 0),
    "scaled": lambda x: softmax(x) * 2,
    "masked element by element": lambda x: softmax(x).masked_fill(x < 0, 0.0),
    "masked column by column": lambda x: torch.where((x[:, :1] > 0), softmax(x), 0.0),
    "ones beside it": lambda x: torch.where(rows(x), softmax(x), 1.0),
    "its logarithm": lambda x: torch.log_softmax(x, -1),
    "of no exponential": lambda x: (e := x.relu()) / e.sum(-1, keepdim=True),
    "another sum": lambda x: x.exp() / x.exp2().sum(-1, keepdim=True),
    "summed over two dimensions": lambda x: (e := x.exp()) / e.sum((1, 2), keepdim=True),
    "a sum along another dimension": lambda x: (e := x[:, :, :6].exp()) / e.sum(1).unsqueeze(-1),
    "an epsilon": lambda x: (e := x.exp()) / (e.sum(-1, keepdim=True) + 1e-3),
    "cut": lambda x: softmax(x)[:, :, :4],
    "rows run together": lambda x: softmax(x).reshape(4, 48),
    "a row in pieces": lambda x: softmax(x).reshape(4, 6, 2, 4),
    "another layout of as many": lambda x: softmax(x).reshape(8, 4, 6),
    "two of them": lambda x: softmax(x) + softmax(x, 1),
    "floored": lambda x: softmax(x).int().float(),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_softmax(name: str) -> None:
    function, dim = FORMS[name]
    assert found(function) == dim  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NOT)
def test_no_softmax(name: str) -> None:
    assert found(NOT[name]) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("dim", [-1, 1])
def test_as_one_operation(dim: int) -> None:
    assert found(lambda x: softmax(x, dim), decomposed=False) == dim % 3
    assert found(lambda x: aten._safe_softmax(x, dim), decomposed=False) == dim % 3


def test_symbolic_sizes_are_known_without_a_guard() -> None:
    assert found(lambda x: softmax(x), symbolic=True) == 2
