"""optim.step_dump: a compiled step as a page that reads like the optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

import fp8compile
from fp8compile import _torch as private
from fp8compile.fx import dump_files
from fp8compile.optim import compiled_step
from tests.support.dumped import without_names


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_step, "COMPILED", {})


@pytest.fixture
def node_by_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page is written before code is generated, and shows the graph alone."""
    monkeypatch.setattr(private, "compile_fx_inner", lambda graph, *_, **__: lambda taken: graph(*taken))


def step(**options: object) -> nn.Parameter:
    p = nn.Parameter(torch.randn(16, 256, dtype=torch.bfloat16))
    p.grad = torch.randn_like(p)
    fp8compile.optim.AdamW([p], **options).step()  # type: ignore[arg-type]
    return p


@pytest.mark.usefixtures("node_by_node")
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


@pytest.mark.usefixtures("node_by_node")
def test_golden_step_of_sgd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One state, so that the page is short; names of values are left out, which another torch chooses otherwise."""
    monkeypatch.setenv(dump_files.VARIABLE, str(tmp_path))
    p = nn.Parameter(torch.randn(16, 256))
    p.grad = torch.randn_like(p)
    fp8compile.optim.SGD([p], lr=0.1, momentum=0.9).step()
    assert_expected_inline(
        without_names((tmp_path / "optimizer-0" / "step.txt").read_text()),
        """\
s = input
f32[s, 128] = input
f32[s, 128] = input
f32[] = input
f32[4] = input
float8_e4m3fn[s, 128] = input
f32[s, 1] = input
uint8[s, 1] = input
f32[s, 128] = fp8.decode
f32[] = aten.select.int
f32[] = aten.select.int
f32[] = aten.select.int
f32[] = aten.select.int
bool[] = aten.ne.Scalar
f32[s, 128] = aten.mul.Tensor
f32[s, 128] = aten.addcmul.default
f32[s, 128] = aten.addcmul.default
f32[s, 128] = aten.addcmul.default
f32[s, 128] = aten.where.self
f32[s, 128] = aten.where.self
float8_e4m3fn[s, 128], f32[s, 1], uint8[s, 1] = fp8.encode
f32[s, 128] = aten.copy_.default
float8_e4m3fn[s, 128] = aten.copy_.default
f32[s, 1] = aten.copy_.default
uint8[s, 1] = aten.copy_.default
""",
    )


@pytest.mark.usefixtures("node_by_node")
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
