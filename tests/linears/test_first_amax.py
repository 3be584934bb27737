"""Which elements the first half of an amax takes together on a GPU, and what is stored there rather than computed twice.

The graphs are traced on fake cuda tensors. What Inductor makes of them is counted in tests/sm90/test_instructions_sm90.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from fp8compile.linears.first_amax import amax_in, first_parts, is_dear
from fp8compile.linears.operands import How, Operands
from fp8compile.linears.row_blocks import ROW_BLOCKS, RowBlocks
from fp8compile.numerics import E4M3
from tests.support.graphs import traced

SHAPE = (64, 512)


def made(fn: Callable[[Tensor], Tensor], shape: tuple[int, ...] = SHAPE, device: str = "cuda") -> Node:
    """The node of what ``fn`` makes of a tensor."""
    (value,) = traced(lambda x: (fn(x),), (shape,), device=device).graph.output_node().args[0]
    return value


def test_what_is_computed_is_taken_in_groups() -> None:
    assert first_parts(made(F.silu), None) == (64 * 4, 128)
    assert first_parts(made(F.silu, (2, 8, 256)), 256) == (32, 128)


def test_a_gradient_with_a_bias_is_taken_in_its_blocks() -> None:
    value = made(F.silu)
    value.meta[ROW_BLOCKS] = RowBlocks(32)
    assert first_parts(value, None) == (2, 32, 512)


@pytest.mark.parametrize(
    ("what", "value"),
    [
        ("a norm's result follows its sums along rows", made(lambda x: x - x.mean(-1, keepdim=True))),
        ("what a matmul made is in memory", made(lambda x: x @ x.t())),
        ("rows of one group", made(F.silu, (64, 128))),
        ("rows that are not whole groups", made(F.silu, (64, 320))),
        ("another order in memory", made(lambda x: x.t().cos())),
        ("no elements", made(F.silu, (0, 512))),
        ("a CPU", made(F.silu, device="cpu")),
    ],
)
def test_the_others_are_taken_along_rows(what: str, value: Node) -> None:
    assert first_parts(value, None) is None, what


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("parts", [(64 * 4, 128), (2, 32, 512)])
def test_a_maximum_may_be_taken_in_any_parts(dtype: torch.dtype, parts: tuple[int, ...]) -> None:
    x = torch.randn(SHAPE).to(dtype)
    assert torch.equal(amax_in(x, parts), x.abs().amax()) and amax_in(x, parts).dtype is dtype
    x[3, 5] = torch.nan
    assert amax_in(x, parts).isnan()


@pytest.mark.parametrize(
    ("fn", "dear"),
    [
        (F.gelu, True),
        (lambda x: F.gelu(x, approximate="tanh"), True),
        (F.mish, True),
        (F.silu, False),
        (F.relu, False),
        (lambda x: (x @ x.t()).erf() @ x, False),
        (lambda x: x.erf() @ x.t() + 1, False),
    ],
)
def test_a_value_behind_an_error_function_is_dear_unless_it_is_in_memory(
    fn: Callable[[Tensor], Tensor], dear: bool
) -> None:
    assert is_dear(made(fn)) is dear
    assert not is_dear(made(fn, device="cpu"))


@pytest.mark.parametrize("stores_dear", [True, False])
@pytest.mark.parametrize(("fn", "dear"), [(F.gelu, True), (F.silu, False)])
def test_a_dear_value_is_stored_unless_memory_is_limited(
    fn: Callable[[Tensor], Tensor], dear: bool, stores_dear: bool
) -> None:
    def linear(x: Tensor, w: Tensor) -> tuple[Tensor]:
        return (fn(x) @ w,)

    graph = traced(linear, (SHAPE, (512, 64))).graph
    (product,) = graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    Operands(graph, stores_dear=stores_dear).codes(product.args[0], "left", How(E4M3))
    stored = graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default)
    kept = [
        node for node in stored if node.meta["val"].dtype is torch.bfloat16
    ]  # others are codes, which matmuls share
    assert bool(kept) is (dear and stores_dear)
