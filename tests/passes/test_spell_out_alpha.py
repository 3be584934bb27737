"""spell_out_alpha: a sum's factor is an operation of its own where Inductor's patterns would lose it, and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch.fx import GraphModule

from fp8compile.passes.spell_out_alpha import spell_out_alpha
from fp8compile.recipe.context import Context
from fp8compile.recipe.recipe import Recipe
from tests.support.graphs import text_of, traced
from tests.support.measure import compiled

SHAPES = ((32, 16), (32, 8), (8, 16))
ADD = torch.ops.aten.add.Tensor


def graph_of(fn: Callable[..., Tensor]) -> GraphModule:
    return traced(lambda *inputs: (fn(*inputs),), SHAPES)


def rewritten(gm: GraphModule) -> str:
    spell_out_alpha(gm.graph, Context(Recipe()))
    gm.graph.lint()
    return text_of(gm.graph)


def scaled(a: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return torch.add(a, x @ w, alpha=0.1)


def behind_views(a: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return torch.add((x @ w).view(2, 16, 16) / 2, a.view(2, 16, 16), alpha=3)


def without_a_product(a: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return torch.add(a, a.sum(0), alpha=0.1)


def without_a_factor(a: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return torch.add(a, x @ w)


def test_golden_the_factor_is_an_operation() -> None:
    assert_expected_inline(
        rewritten(graph_of(scaled)),
        """\
arg0_1: bfloat16[32, 16]
arg1_1: bfloat16[32, 8]
arg2_1: bfloat16[8, 16]
mm: bfloat16[32, 16] = mm(arg1_1, arg2_1)
mul: bfloat16[32, 16] = mul(mm, 0.1)
add_1: bfloat16[32, 16] = add(arg0_1, mul)
return add_1
""",
    )


@pytest.mark.parametrize("fn", [scaled, behind_views])
def test_no_sum_with_a_product_keeps_a_factor(fn: Callable[..., Tensor]) -> None:
    gm = graph_of(fn)
    once = rewritten(gm)
    assert all(not node.kwargs for node in gm.graph.find_nodes(op="call_function", target=ADD))
    assert rewritten(gm) == once, "it is idempotent"


@pytest.mark.parametrize("fn", [without_a_product, without_a_factor])
def test_other_sums_stay_as_they_are(fn: Callable[..., Tensor]) -> None:
    gm = graph_of(fn)
    before = [*gm.graph.nodes]
    rewritten(gm)
    assert [*gm.graph.nodes] == before


def test_what_is_known_of_the_sum_is_known_of_both() -> None:
    gm = graph_of(scaled)
    (node,) = gm.graph.find_nodes(op="call_function", target=ADD)
    node.meta |= {"recompute": 1, "seq_nr": 7}
    rewritten(gm)
    made = [*gm.graph.nodes][-3:-1]
    assert [(n.meta["recompute"], n.meta["seq_nr"]) for n in made] == [(1, 7)] * 2


def attended(q: Tensor, mask: Tensor) -> Tensor:
    scores = torch.matmul(q, q.transpose(-2, -1)) / math.sqrt(16)
    return torch.softmax(torch.add(scores, mask, alpha=4.0), -1) @ q


def by_a_size(a: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return torch.add(a, x @ w, alpha=x.shape[0])


def mixed(a: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return torch.add(a.double(), x @ w, alpha=0.1)


CASES: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "sum": (scaled, SHAPES),
    "bias": (scaled, ((16,), *SHAPES[1:])),
    "views": (behind_views, SHAPES),
    "attention": (attended, ((2, 4, 32, 16), (2, 1, 32, 32))),
    "a size": (by_a_size, SHAPES),
    "mixed dtypes": (mixed, SHAPES),
}


@pytest.mark.parametrize("case", CASES)
def test_generated_code_multiplies_by_the_factor(case: str) -> None:
    """Values and gradients; sums of at most 32 terms in FP32, in another order, differ by 2**-17 of their largest at most."""
    fn, shapes = CASES[case]
    torch.manual_seed(0)
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    results = []
    for run in (fn, compiled(fn, preset="off", **{"debug.codegen": "inductor"})):
        y = run(*inputs)
        results.append((y, *torch.autograd.grad(y.square().sum(), inputs)))
    for expected, found in zip(*results, strict=True):
        assert expected.dtype == found.dtype
        assert float((expected - found).detach().abs().max()) <= 2**-17 * float(expected.detach().abs().max())


def test_a_size_that_is_not_known_is_a_factor_too() -> None:
    torch.manual_seed(0)
    run = torch.compile(by_a_size, backend="fp8compile", dynamic=True)
    for rows in (24, 40):
        a, x, w = torch.randn(rows, 16), torch.randn(rows, 8), torch.randn(8, 16)
        torch.testing.assert_close(run(a, x, w), by_a_size(a, x, w))
