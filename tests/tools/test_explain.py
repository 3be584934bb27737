"""explain and report: what they say, what they leave as it was, their JSON."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from fp8compile import Recipe
from fp8compile._text import human
from fp8compile.reporting.compiled_graph import GraphReport
from fp8compile.reporting.report import Report
from tests.support.measure import compiled, kept_bytes


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 16, 3), nn.BatchNorm2d(16)
        self.head = nn.Linear(16 * 14 * 14, 64)

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        h = torch.relu(self.norm(self.conv(x)))
        return {"out": scale * torch.tanh(self.head(h.flatten(1)))}


def test_explain_says_what_running_does() -> None:
    model, x = Net(), torch.randn(8, 4, 16, 16)
    told = fp8compile.explain(model, (x,), {"scale": 2.0}, recipe=Recipe(debug={"codegen": "eager"}))
    fn = compiled(model)
    kept = kept_bytes(model, lambda x: fn(x, scale=2.0)["out"], (x,))
    ran = fp8compile.report(fn)
    assert told.graphs == ran.graphs
    assert told.saved_bytes == kept < told.saved_bytes_plain


def test_explain_leaves_everything_as_it_was() -> None:
    model, x = Net(), torch.randn(8, 4, 16, 16)
    model.head.weight.grad = torch.ones_like(model.head.weight)
    before = {n: t.clone() for n, t in (*model.named_buffers(), *model.named_parameters())}
    state = torch.random.get_rng_state()
    fp8compile.explain(model, x)
    assert all(torch.equal(before[n], t) for n, t in (*model.named_buffers(), *model.named_parameters()))
    assert torch.equal(model.head.weight.grad, torch.ones_like(model.head.weight)) and model.conv.weight.grad is None
    assert torch.equal(state, torch.random.get_rng_state())


def test_explain_takes_a_compiled_model_and_its_recipe() -> None:
    model, x = Net(), torch.randn(8, 4, 16, 16)
    fn = compiled(model, saved="int8")
    fn(x)["out"].sum().backward()
    assert {s.codec for s in fp8compile.explain(fn, (x,)).saved} == {"int8 1x128 (centred)"}
    assert not fp8compile.explain(fn, (x,), recipe="off").saved


def test_every_entry_names_op_module_and_source_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    report = fp8compile.explain(Net(), (torch.randn(8, 4, 16, 16),), recipe=Recipe(saved={"min_numel": 0}))
    by_module = {s.origin.module: s for s in report.saved}
    assert by_module["conv"].origin.op == "convolution.default"
    assert by_module["conv"].origin.source.startswith("test_explain.py:")
    assert "torch.relu(self.norm(self.conv(x)))" in by_module["conv"].origin.source
    assert by_module["conv"].bytes_before == 8 * 16 * 14 * 14 * 4
    assert by_module["conv"].bytes_after == 8 * 16 * (14 * 14 + 2 * 2), "a map is two groups of 98"
    assert human(report.saved_bytes) in str(report) and f"{report.saved_bytes:,}" in str(report)
    assert "convolution" in str(report.saved) and "conv " in str(report.saved)


def test_a_loss_chooses_what_is_differentiated() -> None:
    model, x = Net(), torch.randn(8, 4, 16, 16)
    assert fp8compile.explain(model, (x,), loss=lambda out: out["out"].square().mean()).saved
    with pytest.raises(ValueError, match=r"loss must return a scalar, not a tensor of shape \(8, 64\)"):
        fp8compile.explain(model, (x,), loss=lambda out: out["out"])


def test_a_model_without_gradients_is_an_inference_graph() -> None:
    model = Net().requires_grad_(False)
    report = fp8compile.explain(model, (torch.randn(8, 4, 16, 16),))
    assert [g.kind for g in report.graphs] == ["inference"] and not report.saved


def test_a_model_that_compiles_to_nothing_is_an_error() -> None:
    class Nothing(nn.Module):
        @torch.compiler.disable
        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    with pytest.raises(ValueError, match="compiled no graph"):
        fp8compile.explain(Nothing(), (torch.ones(2),))


def test_json_holds_all_of_it() -> None:
    report = fp8compile.explain(Net(), (torch.randn(8, 4, 16, 16),))
    data = json.loads(report.to_json())
    again = tuple(GraphReport.from_dict(g) for g in data["graphs"])
    assert again == report.graphs and data["saved_bytes"] == Report(again).saved_bytes
