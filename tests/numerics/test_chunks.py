"""chunks: an order that changes no value, and sums that are not rounded to 16 bit."""

from __future__ import annotations

import math

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fp8compile.numerics.chunks import after, matmul_unrounded


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("first", [0.0, -1.0, math.inf, -math.inf, math.nan])
def test_a_value_stays_what_it_is_whatever_came_before(dtype: torch.dtype, first: float) -> None:
    x = torch.tensor([1.5, -2.0, math.inf, -math.inf, torch.finfo(dtype).tiny], dtype=dtype)
    done = torch.full((2, 3), first), torch.tensor([7]), torch.full((1,), first, dtype=dtype)
    assert torch.equal(after(x, *done), x) and after(x, *done).dtype == dtype
    assert torch.equal(after(x), x)


def test_it_is_computed_from_all_that_came_before() -> None:
    graph = make_fx(after)(torch.ones(4), torch.ones(2, 2), torch.ones(3)).graph
    waiting, seen = [graph.output_node()], set()
    while waiting:
        node = waiting.pop()
        seen.add(node)
        waiting += node.all_input_nodes
    assert set(graph.find_nodes(op="placeholder")) <= seen


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_16_bit_products_keep_fp32(dtype: torch.dtype) -> None:
    """Both products fit into FP32, their sum 1 + 2^-12 does not fit into 16 bits."""
    a, b = torch.tensor([[1.0, 2.0**-6]], dtype=dtype), torch.tensor([[1.0], [2.0**-6]], dtype=dtype)
    product = matmul_unrounded(a, b)
    assert product.dtype == torch.float32 and product.item() == 1 + 2.0**-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wider_products_stay_in_their_dtype(dtype: torch.dtype) -> None:
    a = torch.randn(3, 4, dtype=dtype)
    assert torch.equal(matmul_unrounded(a, a.T), a @ a.T)
