"""Predicted times: FLOPs of each kind of product, and which operations have a price at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from fp8compile.cost.device_rates import RATES
from fp8compile.cost.op_cost import flops, is_priced, microseconds
from fp8compile.fx.ops import opname

aten = torch.ops.aten


def traced(name: str, fn: Any, *args: Tensor) -> Node:
    """The operation of that name in what ``fn`` does."""
    graph = make_fx(fn, tracing_mode="fake")(*args).graph
    return next(node for node in graph.nodes if opname(node) == name)


def attention(causal: bool) -> Any:
    def efficient(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)

    return efficient


Q = torch.empty(2, 4, 32, 16, device="meta")
KV = torch.empty(2, 4, 64, 16, device="meta")
X, W = torch.empty(2, 8, 10, 10), torch.empty(6, 8, 3, 3)
CASES = {
    "mm": (lambda: traced("mm", torch.mm, torch.empty(3, 5), torch.empty(5, 7)), 2 * 3 * 5 * 7),
    "addmm": (
        lambda: traced("addmm", torch.addmm, torch.empty(7), torch.empty(3, 5), torch.empty(5, 7)), 2 * 3 * 5 * 7
    ),
    "bmm": (lambda: traced("bmm", torch.bmm, torch.empty(2, 3, 5), torch.empty(2, 5, 7)), 2 * 2 * 3 * 5 * 7),
    "convolution": (lambda: traced("convolution", torch.conv2d, X, W), 2 * (2 * 6 * 8 * 8) * 8 * 9),
    "transposed convolution": (
        lambda: traced("convolution", torch.conv_transpose2d, X, torch.empty(8, 6, 3, 3)), 2 * (2 * 8 * 10 * 10) * 6 * 9
    ),
    "attention": (
        lambda: traced("_scaled_dot_product_efficient_attention", attention(False), Q, KV, KV), 4 * 2 * 4 * 32 * 16 * 64
    ),
    "causal attention": (
        lambda: traced("_scaled_dot_product_efficient_attention", attention(True), Q, KV, KV), 2 * 2 * 4 * 32 * 16 * 64
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(CASES))
def test_flops_are_those_of_the_definition(name: str) -> None:
    make, expected = CASES[name]
    node = make()
    assert is_priced(node) and flops(node) == expected
    assert microseconds(node, RATES["h100"]) > RATES["h100"].gap


@pytest.mark.parametrize("wanted", [[True, True, True], [False, True, False]])
def test_each_gradient_of_a_convolution_is_its_work_again(wanted: list[bool]) -> None:
    def backward(g: Tensor, x: Tensor, w: Tensor) -> Any:
        return aten.convolution_backward(g, x, w, [6], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, wanted)

    node = traced("convolution_backward", backward, torch.empty(2, 6, 8, 8), X, W)
    assert flops(node) == sum(wanted[:2]) * flops(CASES["convolution"][0]())


def test_fp32_is_multiplied_at_its_own_rate() -> None:
    h100 = RATES["h100"]
    [half, full] = (
        traced("mm", torch.mm, *(torch.empty(4096, 4096, dtype=d) for _ in "ab")) for d in (torch.half, None)
    )
    operations = 2 * 4096**3 / 1e12 * 1e6
    assert microseconds(half, h100) == pytest.approx(operations / h100.bf16 + h100.gap)
    assert microseconds(full, h100) == pytest.approx(operations / h100.fp32 + h100.gap)
    assert microseconds(full, h100.with_tf32) == pytest.approx(2 * operations / h100.bf16 + h100.gap)


def test_one_value_may_be_several_operands() -> None:
    """Attention of a value with itself, and a product of a matrix with itself, are those of two values that are alike."""

    def itself(x: Tensor) -> Any:
        return aten._scaled_dot_product_flash_attention_for_cpu(x, x, x)

    def others(x: Tensor, y: Tensor, z: Tensor) -> Any:
        return aten._scaled_dot_product_flash_attention_for_cpu(x, y, z)

    name, x = "_scaled_dot_product_flash_attention_for_cpu", torch.empty(1, 2, 8, 16)
    assert flops(traced(name, itself, x)) == flops(traced(name, others, x, x.clone(), x.clone()))
