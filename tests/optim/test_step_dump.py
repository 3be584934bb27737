"""optim.step_dump: a compiled step as a page that reads like the optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import fp8compile
from fp8compile.fx import dump_files
from fp8compile.optim import compiled_step


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_step, "COMPILED", {})


def step(**options: object) -> nn.Parameter:
    p = nn.Parameter(torch.randn(16, 256, dtype=torch.bfloat16))
    p.grad = torch.randn_like(p)
    fp8compile.optim.AdamW([p], **options).step()  # type: ignore[arg-type]
    return p


def test_states_are_decoded_and_encoded_in_a_line_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dump_files.VARIABLE, str(tmp_path))
    step()
    folder = tmp_path / "optimizer-0"
    assert {each.name for each in folder.iterdir()} == {"report.txt", "step.txt", "step-full.txt", "step.dot"}
    page = (folder / "step.txt").read_text()
    assert [page.count(f"fp8.{call}(") for call in ("decode", "encode", "store")] == [2, 2, 1]
    assert all(f"\n{name}: " in f"\n{page}" for name in ("param", "grad", "exp_avg_e4m3_expanded_codes"))
    assert page.count("\n") < 60 < 250 < (folder / "step-full.txt").read_text().count("\n")
    told = "states: exp_avg e4m3_expanded, exp_avg_sq e4m3_expanded\nparameter: torch.bfloat16, low bits kept: none\n"
    assert (folder / "report.txt").read_text() == told


def test_nobody_asks_and_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(dump_files.VARIABLE, raising=False)
    monkeypatch.setattr("fp8compile.optim.step_dump.snapshot", lambda graph: pytest.fail("a snapshot was made"))
    step()


def test_a_dump_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    plain = step()
    monkeypatch.setenv(dump_files.VARIABLE, str(tmp_path))
    monkeypatch.setattr(compiled_step, "COMPILED", {})
    torch.manual_seed(1)
    assert torch.equal(step(), plain)
