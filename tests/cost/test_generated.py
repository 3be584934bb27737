"""Which operations are guessed to share a kernel, and what that takes: counted by hand, and beside disassembled kernels."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from fp8compile.cost.device_rates import RATES
from fp8compile.cost.generated import GuessedKernel, Kernels, kernel_of, sums_rows, time_of
from fp8compile.fx.ops import is_reduction, opname
from fp8compile.fx.partition import PartitionedGraph
from tests.sm90.layers import CASES
from tests.support.graphs import split_of, traced
from tests.support.sources import ROOT

LOWERED = ROOT / "benchmarks/results/layer-instructions-sm90-lowered.json"


def node(graph: Graph, name: str, at: int = 0) -> Node:
    return [n for n in graph.nodes if opname(n) == name][at]


def test_a_product_stands_between_two_kernels() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = x.neg()
        return (y + (y @ w).cos()).exp()

    graph = traced(fn, [(32, 32), (32, 32)]).graph
    kernels = Kernels(graph)
    late = kernels.around(node(graph, "cos"))
    assert {opname(n) for n in late.nodes} == {"cos", "add", "exp"}, "the sum waits for the product"
    assert {opname(n) for n in kernels.around(node(graph, "neg")).nodes} == {"neg"}
    assert late is kernels.around(node(graph, "exp"))
    assert late.num_bytes == 2 * 32 * 32 * 3, "y and the product are read, the result is written"
    assert late.instructions == 32 * 32 * (20 + 1 + 6 + 2 * 3)


def test_what_reads_the_same_shares_a_kernel_but_not_for_a_small_table() -> None:
    def fn(x: Tensor, y: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        return x.neg() * table, x.abs(), y.exp() * table

    graph = traced(fn, [(32, 32), (32, 32), (32,)]).graph
    kernels = Kernels(graph)
    assert node(graph, "abs") in kernels.around(node(graph, "neg")).nodes
    assert node(graph, "exp") not in kernels.around(node(graph, "neg")).nodes


def test_views_are_looked_through_and_parts_count_as_parts() -> None:
    def fn(x: Tensor) -> Tensor:
        return x[:, :8].neg().view(-1).exp()

    graph = traced(fn, [(32, 32)], device="cpu").graph
    kernel = Kernels(graph).around(node(graph, "neg"))
    assert {opname(n) for n in kernel.nodes} == {"neg", "exp"}
    assert kernel.num_bytes == 2 * 32 * 8 * 2


@pytest.mark.parametrize(("dims", "rows"), [((-1,), True), ((0,), False), ((0, 1, 2), False), ((1,), False)], ids=str)
def test_reductions_along_rows(dims: tuple[int, ...], rows: bool) -> None:
    graph = traced(lambda x: x.sum(dims), [(4, 8, 16)], dtype=torch.float32).graph
    (reduction,) = filter(is_reduction, graph.nodes)
    assert sums_rows(reduction) == rows == kernel_of(frozenset({reduction})).sums_rows


def test_a_kernel_takes_the_longer_of_bytes_and_instructions() -> None:
    rates = dataclasses.replace(RATES["h200"], copy=2.0, lanes=4.0)
    kernel = GuessedKernel(frozenset(), 2_000_000, 2_000_000.0, False)
    assert kernel.us(rates) == pytest.approx(1.0) == time_of(rates, 2e6, 2e6)
    assert kernel.us(rates, more_bytes=2e6) == pytest.approx(2.0)
    assert kernel.us(rates, more_instructions=2e6) == pytest.approx(1.0), "hidden behind bytes"
    assert kernel.us(rates, more_instructions=6e6) == pytest.approx(2.0)


def test_saved_values_are_made_where_they_are_read() -> None:
    class Gelu(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(torch.relu(self.up(x)).square())

    split = split_of(Gelu(), torch.randn(64, 64), linears="off", disabled="encode_saved")
    (edge,) = (e for e in split.edges if e.forward.op != "placeholder")
    kernels = Kernels(split.bw.graph, {e.backward for e in split.edges})
    products = [n for n in kernels.around(edge.in_order[0]).nodes if "mm" in {opname(i) for i in n.all_input_nodes}]
    assert products, "the gradient, which a product makes, is in the kernel that makes relu again"
    apart = Kernels(split.bw.graph).around(edge.in_order[0])
    assert not [n for n in apart.nodes if "mm" in {opname(i) for i in n.all_input_nodes}]


# ------------------------------------------------------------------------------------------- beside disassembled kernels

SPEED, PLAIN = "storage alone, `speed`", "plain Inductor"
OF_GELU, OF_SWIGLU = (
    "triton_red_fused_gelu_gelu_backward_view",
    "triton_poi_fused__unsafe_view_mul_silu_silu_backward_view",
)
BESIDE = {  # layer, graph, an operation in the kernel, and the kernel that Inductor made of it
    "GELU": ("bert 16k", "fw", "erf", SPEED, "forward triton_poi_fused_gelu_view"),
    "GELU backward": ("bert 16k", "bw", "erf", SPEED, f"backward {OF_GELU}"),
    "SwiGLU": ("llama 16k", "fw", "exp", PLAIN, "forward triton_poi_fused__unsafe_view_mul_silu"),
    "SwiGLU backward": ("llama 16k", "bw", "exp", PLAIN, f"backward {OF_SWIGLU}"),
    "norm": ("bert 16k", "fw", "rsqrt", PLAIN, "forward triton_per_fused_add_native_layer_norm_view"),
}


def small(case: str) -> PartitionedGraph:
    """A layer with as many channels and few tokens."""
    module, args = dataclasses.replace(CASES[case], batch=1, seq=128).empty()
    return split_of(module, *args, linears="off", disabled="encode_saved")


@pytest.mark.parametrize("name", BESIDE)
def test_instructions_beside_the_disassembled_kernels(name: str) -> None:
    case, half, operation, pipeline, kernel = BESIDE[name]
    rows: list[dict[str, Any]] = json.loads(LOWERED.read_text())["rows"]
    (row,) = (row for row in rows if (row["layer"], row["pipeline"]) == (case, pipeline))
    told = next(each["instructions"] for each in row["kernels"] if each["kernel"].startswith(kernel))
    split = small(case)
    graph = split.fw.graph if half == "fw" else split.bw.graph
    saved = {e.backward for e in split.edges} if half == "bw" else ()
    first = node(graph, operation)
    guessed = Kernels(graph, saved).around(first)
    elements = max(n.meta["val"].numel() for n in guessed.nodes if isinstance(n.meta["val"], Tensor))
    assert guessed.instructions / elements == pytest.approx(told, rel=1 / 3)
