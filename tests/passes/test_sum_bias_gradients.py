"""sum_bias_gradients: the first half of a bias gradient's sum rides in the kernel that makes the gradient, on a GPU.

The graphs here are traced on fake cuda tensors; what Inductor makes of them is counted in tests/sm90/test_layers_sm90.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch.fx import GraphModule

from fp8compile.linears.row_blocks import ROW_BLOCKS, RowBlocks
from fp8compile.passes.sum_bias_gradients import sum_bias_gradients
from fp8compile.recipe.context import Context
from fp8compile.recipe.recipe import Recipe
from tests.support.graphs import text_of, traced

ROWS, COLUMNS = 2048, 512
SHAPES = ((ROWS, COLUMNS), (ROWS, COLUMNS), (COLUMNS, 16))


def rewritten(gm: GraphModule, recipe: Recipe | None = None) -> str:
    sum_bias_gradients(gm.graph, Context(recipe or Recipe()))
    gm.graph.lint()
    gm.recompile()
    return text_of(gm.graph)


def gated(g: Tensor, h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """A gradient made by a pointwise operation, a product that reads it and its sum over rows."""
    d = g * h
    return d @ w, d.sum(0, keepdim=True)


def with_value(g: Tensor, h: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """The activation's value is made again from h beside the gradient, for the weight's gradient."""
    d, value = g * h, h.sigmoid()
    return d.view(2, -1, COLUMNS) @ w, value @ w, d.sum(0)


def made_by_a_product(g: Tensor, h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return (d := g @ w), d.sum(0)


def test_golden_the_sum_is_taken_in_blocks_of_rows() -> None:
    assert_expected_inline(
        rewritten(traced(gated, SHAPES)),
        """\
g_1: bfloat16[2048, 512]
h_1: bfloat16[2048, 512]
w_1: bfloat16[512, 16]
mul_1: bfloat16[16, 128, 512] = in_blocks(g_1, h_1)
view_2: bfloat16[2048, 512] = unblocked(mul_1)
mm: bfloat16[2048, 16] = mm(view_2, w_1)
view_3: bfloat16[1, 512] = summed(mul_1)
return mm, view_3
""",
    )


def test_golden_what_is_made_beside_it_is_computed_in_blocks_too() -> None:
    assert_expected_inline(
        rewritten(traced(with_value, SHAPES)),
        """\
g_1: bfloat16[2048, 512]
h_1: bfloat16[2048, 512]
w_1: bfloat16[512, 16]
mul_1: bfloat16[16, 128, 512] = in_blocks(g_1, h_1)
sigmoid_1: bfloat16[16, 128, 512] = in_blocks(h_1)
view_7: bfloat16[2048, 512] = unblocked(sigmoid_1)
view_4: bfloat16[2048, 512] = unblocked(mul_1)
mm: bfloat16[2048, 16] = mm(view_4, w_1)
_unsafe_view: bfloat16[2, 1024, 16] = _unsafe_view(mm)
mm_1: bfloat16[2048, 16] = mm(view_7, w_1)
view_8: bfloat16[512] = summed(mul_1)
return _unsafe_view, mm_1, view_8
""",
    )


def taken_in_blocks(fn: Callable[..., Any], rows: int = 512, **kwargs: Any) -> GraphModule:
    """The graph of ``fn`` whose gradient, the first product, has its codes and statistics taken in blocks of rows."""
    gm = traced(fn, SHAPES, **kwargs)
    made = next(node for node in gm.graph.nodes if node.name in ("mul", "mul_1", "mm"))
    made.meta[ROW_BLOCKS] = RowBlocks(rows)
    return gm


def test_golden_a_gradient_that_is_taken_in_blocks_already_is_summed_in_these() -> None:
    assert_expected_inline(
        rewritten(taken_in_blocks(made_by_a_product)),
        """\
g_1: bfloat16[2048, 512]
h_1: bfloat16[2048, 512]
w_1: bfloat16[512, 16]
mm: bfloat16[2048, 16] = mm(g_1, w_1)
view_1: bfloat16[16] = summed(mm)
return mm, view_1
""",
    )


@pytest.mark.parametrize("fn", [gated, with_value, made_by_a_product])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_sum_in_given_blocks_differs_by_no_more_than_its_order(fn: Callable[..., Any], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values = [torch.randn(shape).to(dtype) for shape in SHAPES]
    gm = taken_in_blocks(fn, dtype=dtype)
    once = rewritten(gm)
    assert rewritten(gm) == once and "summed" in once
    *others, total = gm(*values)
    *expected, _ = fn(*values)
    assert all(torch.equal(a, b) for a, b in zip(others, expected, strict=True))
    d = (values[0] @ values[2] if fn is made_by_a_product else values[0] * values[1]).double()
    in_order = ROWS * 2.0**-24 * d.abs().sum(0) + torch.finfo(dtype).eps / 2 * d.sum(0).abs()
    assert ((total.double() - d.sum(0)).abs() <= in_order).all()


@pytest.mark.parametrize("rows", [0, 3])
def test_blocks_that_do_not_divide_the_rows_are_not_taken(rows: int) -> None:
    gm = taken_in_blocks(made_by_a_product, rows)
    before = text_of(gm.graph)
    assert rewritten(gm) == before


@pytest.mark.parametrize("fn", [gated, with_value])
def test_it_is_idempotent(fn: Callable[..., Any]) -> None:
    gm = traced(fn, SHAPES)
    once = rewritten(gm)
    assert rewritten(gm) == once


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("fn", [gated, with_value])
def test_only_the_sum_changes_and_by_no_more_than_its_order(fn: Callable[..., Any], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values = [torch.randn(shape).to(dtype) for shape in SHAPES]
    gm = traced(fn, SHAPES, dtype)
    rewritten(gm)
    *others, total = gm(*values)
    *expected, _ = fn(*values)
    assert all(torch.equal(a, b) for a, b in zip(others, expected, strict=True))
    d = (values[0] * values[1]).double()
    in_order = ROWS * 2.0**-24 * d.abs().sum(0) + torch.finfo(dtype).eps / 2 * d.sum(0).abs()
    assert ((total.double() - d.sum(0)).abs() <= in_order).all()


def softmax_backward(g: Tensor, h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    d = g * h
    d = d - d.sum(-1, keepdim=True).expand(d.shape)
    return d @ w, d.sum(0)


def by_a_product(g: Tensor, h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    d = h @ (w @ w.t())
    return (g * d) @ w, d.sum(0)


def read_by_nobody_else(g: Tensor, h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return g @ w, (g * h).sum(0)


def over_columns(g: Tensor, h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    d = g * h
    return d @ w, d.sum(1)


def into_another_dtype(g: Tensor, h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    d = g * h
    return d @ w, d.sum(0, dtype=torch.float32)


def with_a_broadcast(g: Tensor, h: Tensor, w: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    d = g * row
    return d @ w, d.sum(0)


def beside_a_broadcast(g: Tensor, h: Tensor, w: Tensor, row: Tensor) -> tuple[Tensor, ...]:
    """What is made beside it cannot be repeated at the blocks' shape, so both stay."""
    d = g * h
    return d @ w, (h * row) @ w, d.sum(0)


@pytest.mark.parametrize(
    "fn",
    [
        softmax_backward,
        by_a_product,
        read_by_nobody_else,
        over_columns,
        into_another_dtype,
    ],
)
def test_it_declines(fn: Callable[..., Any]) -> None:
    gm = traced(fn, SHAPES)
    before = text_of(gm.graph)
    assert rewritten(gm) == before


@pytest.mark.parametrize("fn", [with_a_broadcast, beside_a_broadcast])
def test_it_declines_what_cannot_be_computed_at_another_shape(fn: Callable[..., Any]) -> None:
    gm = traced(fn, (*SHAPES, (1, COLUMNS)))
    before = text_of(gm.graph)
    assert rewritten(gm) == before


@pytest.mark.parametrize(
    "case",
    [
        {"device": "cpu"},
        {"dtype": torch.float64},
        {"shapes": ((1024, COLUMNS), (1024, COLUMNS), (COLUMNS, 16))},
        {"shapes": ((ROWS + 16, COLUMNS), (ROWS + 16, COLUMNS), (COLUMNS, 16))},
    ],
    ids=["on a CPU", "float64", "small", "no block divides the rows"],
)
def test_it_declines_where(case: dict[str, Any]) -> None:
    gm = traced(gated, **{"shapes": SHAPES, **case})
    before = text_of(gm.graph)
    assert rewritten(gm) == before


def test_a_recipe_that_rewrites_nothing_leaves_it() -> None:
    gm = traced(gated, SHAPES)
    before = text_of(gm.graph)
    assert rewritten(gm, Recipe.preset("off")) == before


def test_a_sum_of_one_number_is_left() -> None:
    """As the statistics of a loss have it: a tensor without dimensions has no rows."""
    gm = traced(lambda x: (x.relu().sum([]), x.relu()), ((),))
    before = text_of(gm.graph)
    assert rewritten(gm) == before and "sum" in before
