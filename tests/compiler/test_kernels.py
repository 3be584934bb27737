"""The kernels that explain lists: what Inductor generated, and what its kernels move."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import compile_fx, metrics

import fp8compile
from fp8compile.cost.device_rates import RATES
from fp8compile.reporting.kernel import GENERATED, LIBRARY
from fp8compile.reporting.report import Report

ROWS, WIDTH = 32, 64


class Two(nn.Module):
    """Two linears with a GELU between them, and a graph break before a third."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.last = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.nn.functional.gelu(self.up(x)))
        if self.breaks:
            torch._dynamo.graph_break()
            y = self.last(y).sin()
        return y


def listed(model: nn.Module) -> Report:
    x = torch.randn(ROWS, WIDTH).requires_grad_()
    return fp8compile.explain(model, x, recipe={"saved.min_numel": 0}, kernels=True)


@functools.cache
def of_two() -> Report:
    torch.manual_seed(0)
    return listed(Two())


def test_bytes_are_those_that_inductor_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        compile_fx.inductor_metrics_log, "isEnabledFor", lambda level: True
    )  # it counts where it logs
    of_two()  # what is compiled once a process, to test the compiler, is not counted
    metrics.reset()
    report = listed(Two())
    kernels = report.graphs[0].kernels
    assert sum(kernel.moved for kernel in kernels) == metrics.num_bytes_accessed > 0
    assert {kernel.half for kernel in kernels} == {"forward", "backward"}
    for half in ("forward", "backward"):
        assert [k.number for k in kernels if k.half == half] == list(range(sum(k.half == half for k in kernels)))


def test_matmuls_are_the_library_s_with_their_operations() -> None:
    kernels = of_two().graphs[0].kernels
    matmuls = [(k.half, k.module, k.operations, k.flops) for k in kernels if k.kind == LIBRARY]
    each = 2 * ROWS * WIDTH * WIDTH
    assert sorted(matmuls) == sorted(
        [(half, name, "mm", each) for name in ("up", "down") for half in ("forward", "backward", "backward")]
    )
    read, written = 4 * (ROWS * WIDTH + WIDTH * WIDTH), 4 * ROWS * WIDTH
    forward = next(k for k in kernels if k.kind == LIBRARY and k.half == "forward")
    assert (forward.read, forward.written) == (read, written)
    assert all(k.flops == 0 for k in kernels if k.kind == GENERATED)


def test_nodes_are_those_of_the_last_graph() -> None:
    (graph,) = of_two().graphs
    names = [{line.name for line in part.lines} for part in graph.steps[-1].after.parts]
    halves = dict(zip(("forward", "backward"), names, strict=True))
    assert all(kernel.node in halves[kernel.half] for kernel in graph.kernels)


def test_each_graph_has_its_own() -> None:
    first, second = listed(Two(breaks=True)).graphs
    modules = [{k.module for k in graph.kernels if k.kind == LIBRARY} for graph in (first, second)]
    assert modules == [{"up", "down"}, {"last"}]


def test_attention_s_backward_has_five_products() -> None:
    class Attention(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    queries, keys, width = 16, 48, 8
    q, k, v = (torch.randn(2, 4, n, width).requires_grad_() for n in (queries, keys, keys))
    kernels = fp8compile.explain(Attention(), (q, k, v), kernels=True).graphs[0].kernels
    product = 2 * 2 * 4 * queries * keys * width
    assert {k.half: k.flops for k in kernels if k.flops} == {"forward": 2 * product, "backward": 5 * product}


def test_the_page_has_a_table_of_them_and_other_reports_have_not() -> None:
    report = of_two()
    (table,) = (each for each in report.page_content.tables if each.name == "kernels")
    assert len(table.rows) == len(report.graphs[0].kernels)
    plain = fp8compile.explain(Two(), torch.randn(ROWS, WIDTH))
    assert not plain.graphs[0].kernels
    assert "kernels" not in {each.name for each in plain.page_content.tables}
    assert "kernels" not in json.loads(report.to_json())["graphs"][0]


def test_predicted_time_is_the_roofline_s() -> None:
    kernel = next(k for k in of_two().graphs[0].kernels if k.kind == LIBRARY)
    rates = RATES["h100"]
    by_bytes, by_flops = kernel.moved / (rates.copy * 1e12), kernel.flops / (rates.bf16 * 1e12)
    assert kernel.microseconds(rates) == pytest.approx(max(by_bytes, by_flops) * 1e6 + rates.gap)


def test_a_model_without_memory_runs_no_kernels() -> None:
    with torch.device("meta"):
        model = Two()
    with pytest.raises(ValueError, match=r"explain\(kernels=True\) runs what it generates"):
        fp8compile.explain(model, torch.empty(ROWS, WIDTH, device="meta"), kernels=True)
