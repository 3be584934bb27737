"""A graph counts as often as it runs in a step: eight blocks eight times, what was compiled for another shape not at all."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch import Tensor, nn

import fp8compile
from tests.support.measure import compiled, kept_bytes

WIDTH = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(self.linear(x))


class Broken(nn.Module):
    """Four blocks, compiled each by itself: one graph serves all."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return x


def _step(fn: Callable[..., Tensor], x: Tensor) -> None:
    fn(x).sum().backward()


def test_a_graph_that_four_blocks_run_counts_four_times() -> None:
    model, x = Broken(), torch.randn(128, WIDTH, requires_grad=True)
    fn = compiled(model, **{"saved.min_numel": 0})
    kept = kept_bytes(model, fn, (x,))
    _step(fn, x)
    report = fp8compile.report(fn)
    assert max(g.runs for g in report.graphs) > 1
    assert report.saved_bytes == kept
    assert report.saved_bytes == fp8compile.explain(model, x, recipe={"saved.min_numel": 0}).saved_bytes


def test_what_was_compiled_for_other_shapes_is_not_added() -> None:
    model = Block()
    fn = torch.compile(model, backend="fp8compile", options={"debug.codegen": "eager"}, dynamic=False)
    for rows in (128, 256, 512):
        _step(fn, torch.randn(rows, WIDTH))
        report = fp8compile.report(fn)
        assert sum(g.runs for g in report.graphs) == 1
    assert [g.runs for g in report.graphs] == [0, 0, 1]
    assert report.saved_bytes == report.graphs[2].saved_bytes
    assert "2 of them not run in the last step" in str(report)


def test_several_forwards_before_a_backward_are_alive_together() -> None:
    model, x = Block(), torch.randn(128, WIDTH)
    fn = compiled(model)
    sum(fn(x).sum() for _ in range(3)).backward()
    assert fp8compile.report(fn).graphs[0].runs == 3
    _step(fn, x)
    assert fp8compile.report(fn).graphs[0].runs == 1


def test_a_forward_without_a_backward_is_let_go() -> None:
    model, x = Block(), torch.randn(128, WIDTH)
    fn = compiled(model)
    for _ in range(3):
        fn(x)
        gc.collect()
    _step(fn, x)
    assert fp8compile.report(fn).graphs[0].runs == 1
    with torch.no_grad():
        fn(x)
    assert fp8compile.report(fn).graphs[0].runs == 1, "what autograd does not record saves nothing"


def test_another_model_that_trains_between_its_steps_does_not_count() -> None:
    first, second = Block(), nn.Sequential(Block(), nn.Tanh())
    a, b = compiled(first), compiled(second)
    x = torch.randn(128, WIDTH)
    for _ in range(2):
        _step(a, x)
        _step(b, x)
    assert [g.runs for g in fp8compile.report(a).graphs] == [1]
    assert sum(g.runs for g in fp8compile.report(b).graphs) >= 1
