"""Gradients that are summed into a bias are taken in blocks of rows on a GPU: which, in what blocks, and with equal numbers.

The graphs are traced on fake cuda tensors. What Inductor makes of them is counted in tests/sm90/test_layers_sm90.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fp8compile.linears import row_blocks
from fp8compile.linears.known_scales import (
    GRADIENT,
    INPUT,
    KnownScales,
    ScaleRow,
    codes_under,
    encoded_in,
    totals_of,
)
from fp8compile.linears.layouts import as_operand, stored_matrix
from fp8compile.linears.row_blocks import (
    ALONG_ROWS,
    BLOCKS,
    LEAST_COLUMNS,
    OTHER_SUMS,
    OWN_SUMS,
    ROW_BLOCKS,
    SMALL,
    SYMBOLIC,
    RowBlocks,
    in_blocks,
    take_in_blocks,
)
from fp8compile.numerics import E5M2
from fp8compile.recipe.context import ScaleInput
from tests.support.graphs import text_of, traced

ROWS, COLUMNS = 2048, 512
SHAPES = ((ROWS, COLUMNS), (ROWS, COLUMNS), (1, 1))
INF, NAN = float("inf"), float("nan")


def gated(g: Tensor, h: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A gradient, its sum over rows, and what an activation's value is made of for the weight's gradient."""
    return (d := g * h), d.sum(0, keepdim=True), h.sigmoid()


def marked(
    fn: Callable[..., Any] = gated,
    shapes: tuple[tuple[int, ...], ...] = SHAPES,
    device: str = "cuda",
    width: int | None = None,
) -> tuple[GraphModule, list[Node]]:
    """The graph of ``fn``, and what it returns: a gradient first, an input last."""
    gm = traced(fn, shapes, device=device)
    returned: Any = gm.graph.output_node().args[0]
    take_in_blocks({returned[0]: width}, {returned[-1]: width})
    return gm, list(returned)


def blocks(*args: Any, **kwargs: Any) -> RowBlocks | None:
    found: RowBlocks | None = marked(*args, **kwargs)[1][0].meta.get(ROW_BLOCKS)
    return found


@pytest.mark.parametrize(
    ("rows", "columns", "size"),
    [(16384, 768, 512), (2048, 768, 128), (256 * 197, 768, 256), (32 * 197, 768, 32), (2048, 4096, 512)],
)
def test_the_largest_block_that_divides_the_rows_and_leaves_enough_sums(rows: int, columns: int, size: int) -> None:
    assert blocks(shapes=((rows, columns), (rows, columns), (1, 1))) == RowBlocks(size)
    larger = [each for each in BLOCKS if each > size]
    assert all(rows % each or rows * columns < each * LEAST_COLUMNS for each in larger)


def with_own_sums(g: Tensor, h: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As the backward of a norm or a softmax."""
    d = g * h
    d = d - d.sum(-1, keepdim=True)
    return d, d.sum(0), h


def with_other_sums(g: Tensor, h: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    return (d := g * h), d.sum(0), d.amax(-1), h


def without_a_bias(g: Tensor, h: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    return (d := g * h), d.sum(-1), h


def unread(g: Tensor, h: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    return g * h, h


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ({"fn": with_own_sums}, RowBlocks(reason=OWN_SUMS)),
        ({"fn": with_other_sums}, RowBlocks(reason=OTHER_SUMS)),
        ({"shapes": ((1024, COLUMNS), (1024, COLUMNS), (1, 1))}, RowBlocks(reason=SMALL)),
        (
            {"shapes": ((ROWS + 16, COLUMNS), (ROWS + 16, COLUMNS), (1, 1))},
            RowBlocks(reason="no block of 32 rows or more divides 2,064"),
        ),
        ({"fn": without_a_bias}, ALONG_ROWS),
        ({"fn": unread}, None),
        ({"device": "cpu"}, None),
    ],
    ids=["own sums", "other sums", "small", "no block divides", "no bias", "no sum", "on a CPU"],
)
def test_others_are_taken_along_rows_with_the_reason(case: dict[str, Any], expected: RowBlocks | None) -> None:
    assert blocks(**case) == expected


def test_symbolic_sizes_are_taken_along_rows() -> None:
    gm = make_fx(gated, tracing_mode="symbolic")(*(torch.randn(shape) for shape in SHAPES))
    returned: Any = gm.graph.output_node().args[0]
    with mock.patch.object(row_blocks, "_is_on_gpu", lambda value: True):
        take_in_blocks({returned[0]: None}, {returned[-1]: None})
    assert returned[0].meta[ROW_BLOCKS] == RowBlocks(reason=SYMBOLIC)
    assert (
        str(RowBlocks(reason=SYMBOLIC)) == f"along rows: {SYMBOLIC}"
        and str(RowBlocks(64)) == "down blocks of 64 rows"
    )


def from_elsewhere(g: Tensor, h: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    """The input is computed from another tensor than the gradient."""
    return (d := g * h), d.sum(0), (scale + 0).sigmoid()


def of_a_norm(g: Tensor, h: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    return (d := g * h), d.sum(0), h - h.sum(-1, keepdim=True)


@pytest.mark.parametrize(("fn", "size"), [(gated, 64), (from_elsewhere, 0), (of_a_norm, 0)])
def test_an_input_is_laid_out_in_the_blocks_of_the_gradient_computed_beside_it(
    fn: Callable[..., Any], size: int
) -> None:
    gradient, *_, value = marked(fn)[1]
    assert gradient.meta[ROW_BLOCKS].rows == 64
    assert value.meta.get(ROW_BLOCKS, ALONG_ROWS).rows == size


def test_a_matrix_of_another_width_than_the_value_has() -> None:
    """Attention's gradient, ``[batch, seq, heads, size]``, summed as ``[rows, heads * size]``."""

    def heads(g: Tensor, h: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        d = (g * h).view(4, -1, 8, 64)
        return d, d.view(-1, COLUMNS).sum(0), h

    (gradient, *_) = marked(heads, width=COLUMNS)[1]
    assert gradient.meta[ROW_BLOCKS] == RowBlocks(64)
    assert in_blocks(gradient, COLUMNS, RowBlocks(64)) == (ROWS // 64, 64, COLUMNS)
    assert in_blocks(gradient, COLUMNS, RowBlocks(3)) is None is in_blocks(gradient, COLUMNS, ALONG_ROWS)


def test_only_gradients_have_statistics_down_blocks() -> None:
    with mock.patch.object(row_blocks, "_is_on_gpu", lambda value: True):
        gm, (gradient, _, value) = marked(shapes=(*SHAPES[:2], (8, 4)), device="cpu")
    scales = next(node for node in gm.graph.nodes if node.name.startswith("scale"))
    known = KnownScales(gm.graph, scales, ScaleInput(2, 8, True, ()))
    rows = {role: known.row_of(node, E5M2, role, "m") for node, role in ((gradient, GRADIENT), (value, INPUT))}
    assert [found and found[0].blocks for found in rows.values()] == [RowBlocks(64), ALONG_ROWS]


def encoded(size: int) -> GraphModule:
    """Both layouts of a gradient's codes, and its statistics, taken in blocks of so many rows, or along rows."""
    gm, (value, *_) = marked(device="cpu")
    scale = next(node for node in gm.graph.nodes if node.name.startswith("scale"))
    row = ScaleRow(0, E5M2, GRADIENT, "m", RowBlocks(size))

    def by_columns(codes: Tensor) -> Tensor:
        return as_operand(codes, True, True)

    codes = codes_under(gm.graph, value, scale, row, None, stored_matrix)
    turned = codes_under(gm.graph, value, scale, row, None, by_columns, across=True)
    (made,) = encoded_in(gm.graph).values()
    totals = totals_of(gm.graph, [(row, *made)])
    gm.graph.output_node().args = ((codes, turned, totals),)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm


def test_golden() -> None:
    assert_expected_inline(
        text_of(encoded(64).graph),
        """\
g_1: bfloat16[2048, 512]
h_1: bfloat16[2048, 512]
scale_1: bfloat16[1, 1]
mul: bfloat16[2048, 512] = mul(g_1, h_1)
view_3: bfloat16[32, 64, 512] = encode(mul, scale_1)
reciprocal_1: float32[] = encode(mul, scale_1)
sum_2: float32[32, 512] = partials(view_3, reciprocal_1)
sum_3: float32[32, 512] = partials(view_3, reciprocal_1)
amax: float32[32, 512] = partials(view_3, reciprocal_1)
view_5: float8_e5m2[512, 2048] = encode(mul, scale_1)
view_2: float8_e5m2[2048, 512] = encode(mul, scale_1)
where_7: float32[1, 4] = totals(amax, sum_2, sum_3)
return view_2, view_5, where_7
""",
    )


@pytest.mark.parametrize("size", BLOCKS)
def test_codes_and_statistics_are_those_along_rows_bit_for_bit(size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    g, h = (torch.randn(ROWS, COLUMNS, generator=generator).bfloat16() * 300 for _ in range(2))
    g[3, 5], g[700, 511], g[2047, 0] = INF, NAN, -INF
    for values in ((g, h), (g.nan_to_num(0, 0, 0), h)):
        found, expected = (encoded(each)(*values, torch.full((1, 1), 0.5)) for each in (size, 0))
        for ours, theirs in zip(found[:2], expected[:2], strict=True):
            assert ours.stride() == theirs.stride() and torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
        assert torch.equal(found[2].view(torch.int32), expected[2].view(torch.int32)) and found[2][0, 1] > 0


def test_it_is_idempotent() -> None:
    gm, (gradient, _, value) = marked()
    before = {node: node.meta.get(ROW_BLOCKS) for node in gm.graph.nodes}
    take_in_blocks({gradient: None}, {value: None})
    assert before == {node: node.meta.get(ROW_BLOCKS) for node in gm.graph.nodes}
