"""Whose report is whose: found by the parameters of the model, once for each graph, and none of what is gone."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from fp8compile.compiler import report_store
from fp8compile.reporting.compiled_graph import GraphReport
from fp8compile.reporting.entries import LINEAR

OPTIONS = {"debug.codegen": "eager", "saved.min_numel": 0}


def trained(width: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, 16))
    run = torch.compile(model, backend="fp8compile", options=OPTIONS)
    run(torch.randn(8, 16)).sum().backward()
    return run  # type: ignore[return-value]


def widths(model: nn.Module) -> set[int | str]:
    return {skip.shape[1] for skip in fp8compile.report(model).notes.skipped(LINEAR) if skip.direction == "forward"}


def test_each_model_has_its_own_graphs() -> None:
    first, second = trained(32), trained(48)
    assert widths(first) == {32, 16} and widths(second) == {48, 16}
    assert {id(c) for c in report_store.compiled_for(first)}.isdisjoint(
        {id(c) for c in report_store.compiled_for(second)}
    )


def test_what_is_gone_is_forgotten_and_a_graph_compiled_again_is_one() -> None:
    model = trained(32)
    gc.collect()
    trained(40)
    known = len(report_store._compiled)
    for _ in range(3):
        torch._dynamo.reset()
        model(torch.randn(8, 16)).sum().backward()
    assert len(fp8compile.report(model).graphs) == 1
    assert len(report_store._compiled) <= known + 1
    del model
    torch._dynamo.reset()
    gc.collect()
    kept = trained(56)
    assert all(c.alive or not c.parameters for c in report_store._compiled) and fp8compile.report(kept)


def test_no_half_written_report_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(report_store.private, "cache_dir", lambda: str(tmp_path))
    monkeypatch.setattr(report_store.json, "dump", full)
    report_store._write("key", (GraphReport("training"),))
    assert not list((tmp_path / "fp8compile").iterdir())


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


def test_another_class_with_the_same_layers_is_not_served() -> None:
    """A model compiled in place is in no module stack of its graph, and its layers are like those of many models."""

    class Other(Twice):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).relu())

    model = Twice()
    model.compile(backend="fp8compile", options=OPTIONS)
    model(torch.randn(8, 16)).sum().backward()
    assert fp8compile.report(model).graphs and fp8compile.report(Twice()).graphs
    with pytest.raises(ValueError, match="no graph of this Other"):
        fp8compile.report(Other())
