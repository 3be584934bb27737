"""What a person reads: a first screen, tables that print themselves, why one module is as it is."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8compile
from fp8compile.reporting.compiled_graph import GraphReport
from fp8compile.reporting.entries import LINEAR, Linear, SavedEntry
from fp8compile.reporting.report import Report
from fp8compile.reporting.tables import Entries
from fp8compile.reporting.waterfall import Amount, Waterfall


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(64, 176), nn.Linear(64, 176), nn.Linear(176, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(64), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Deep(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.lm_head = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def explained(layers: int) -> Report:
    torch._dynamo.reset()
    return fp8compile.explain(
        Deep(layers), torch.randn(32, 64), recipe={"linears.emulate": True, "saved.min_numel": 0}
    )


@pytest.fixture(scope="module")
def report() -> Report:
    return explained(3)


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_first_screen_is_short_whatever_the_depth(
    report: Report, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = str(report).splitlines()
    deeper = str(explained(6)).splitlines()
    assert len(lines) <= 25 and len(deeper) == len(lines)
    assert all(len(line) <= columns for line in lines)
    assert lines[1].startswith("saved for backward: ") or lines[2].startswith("saved for backward: ")
    assert any("layers.0-2.mlp.up" in line for line in lines) and any("layers.0-5.mlp.up" in line for line in deeper)


@pytest.mark.parametrize("columns", [60, 80, 150])
def test_module_paths_are_never_broken(report: Report, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for entries in report.tables:
        text = str(entries)
        modules = {"".join("-" if c.isdigit() else c for c in e.origin.module) for e in entries}
        shown = {"".join("-" if c.isdigit() else c for c in word) for word in text.split()}
        assert {m.replace("-", "") for m in modules if m} <= {word.replace("-", "") for word in shown}


@pytest.mark.parametrize("columns", [60, 80, 100, 120])
def test_no_cell_is_cut(report: Report, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = str(report.saved).splitlines()[1:]
    assert lines[0].endswith("as codes") and all(line.endswith("iB") or line.endswith(" B") for line in lines[1:])


@pytest.mark.parametrize("columns", [60, 80])
def test_a_long_reason_costs_no_digit(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    amounts = Waterfall(
        (Amount("stored as codes", -123_456_789, 1_234),), (Amount("a reason " * 20, 987_654_321, 7),)
    )
    graph = GraphReport("training", saved_bytes=987_654_321, saved_bytes_plain=1_111_111_110, waterfall=amounts)
    text = str(Report((graph,)))
    assert all(number in text for number in ("-123,456,789", "1,234", "987,654,321", "1,111,111,110"))
    assert all(len(line) <= columns for line in text.splitlines())


@pytest.mark.parametrize("columns", [60, 80])
def test_long_remarks_leave_a_first_screen_short(
    report: Report, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    graphs = (dataclasses.replace(report.graphs[0], remarks=("a word " * 40, "another " * 40)), *report.graphs[1:])
    lines = str(Report(graphs)).splitlines()
    assert len(lines) <= 25 and any(line.startswith("remark: another") for line in lines)


def test_a_file_is_the_same_from_every_terminal(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = set()
    for columns in ("60", "100", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        texts.add(report.to_text())
    assert len(texts) == 1


def test_a_linear_is_one_row(report: Report) -> None:
    text = str(report.linears)
    [row] = [line for line in text.splitlines() if "mlp.up" in line]
    assert row.count("e4m3 x e4m3") == 1 and row.count("e5m2 x e4m3") == 2, "forward; dgrad and wgrad"
    assert " x3 " in row


def test_a_reason_stands_once(report: Report) -> None:
    text = str(report.skips)
    reasons = {skip.reason for skip in report.skips}
    flat = " ".join(text.split())
    assert all(flat.count(reason) == 1 for reason in reasons), reasons


def test_rows_convert(report: Report) -> None:
    rows = report.saved.rows()
    assert rows == json.loads(report.saved.to_json(), object_hook=lambda d: d | {"shape": tuple(d["shape"])})
    assert sum(row["bytes_after"] for row in rows) == sum(s.bytes_after for s in report.saved)
    assert {"module", "op", "source", "shape", "dtype", "nbytes", "codec", "runs"} <= set(rows[0])
    assert str(Entries(SavedEntry)) == "no tensors stored as codes" and Entries(SavedEntry).rows() == []
    assert report.saved == tuple(report.saved), "it is a tuple"


def test_why_tells_of_one_module(report: Report) -> None:
    why = report.why("layers.1.mlp")
    assert {e.origin.module.split(".")[1] for e in why.notes.linears} == {"1"}
    assert len(why.notes.linears) == 9
    assert "layers.1.mlp.up" in str(why) and "layers.0" not in str(why)
    left = report.why("lm_head").notes.skipped(LINEAR)
    assert {skip.direction for skip in left} == {"forward", "dgrad", "wgrad"}
    assert "linears.skip" in str(report.why("lm_head"))


def test_why_of_a_module_that_is_not_there() -> None:
    report = explained(1)
    with pytest.raises(ValueError, match=r"no module 'layers.0.mlpp'. Did you mean 'layers.0.mlp'\?"):
        report.why("layers.0.mlpp")
    with pytest.raises(ValueError, match=r"no module 'layers\.1'"):
        report.why("layers.1")


def test_why_of_a_module_that_nothing_was_done_in(monkeypatch: pytest.MonkeyPatch) -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(64, 64), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return self.idle(self.used(x)).sin()

    monkeypatch.setenv("COLUMNS", "120")
    why = fp8compile.explain(Idle(), torch.randn(64, 64)).why("idle")
    assert (
        str(why)
        == "in idle:\nnothing made in it is saved for backward, it runs no linear, and it holds no FP32 island"
    )


def test_everything_is_in_the_whole_text(report: Report) -> None:
    text = report.to_text()
    assert all(
        title in text for title in ("matmuls of linears in FP8", "tensors stored as codes", "left as they are")
    )
    assert len(Entries(Linear, report.linears)) == len(report.linears)
