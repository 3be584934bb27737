"""A whole step's dump: its passes, its updates, and what they write in place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

import fp8compile
from fp8compile import Recipe
from tests.support.dumped import LATE, STEPS, Gated, without_names


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_a_whole_step_is_dumped_with_its_updates(codegen: str, tmp_path: Path) -> None:
    model = Gated()
    optimizer = fp8compile.optim.AdamW(model)
    recipe = Recipe(debug={"dump": str(tmp_path), "codegen": codegen}, saved={"min_numel": 0})
    step = fp8compile.train_step(model, lambda net, x: net(x).square().mean(), optimizer, recipe=recipe)
    step(torch.randn(128, 64))
    generated = LATE if codegen == "inductor" else []
    names = [step.name[3:] for step in sorted((tmp_path / "graph-0").glob("??-*"))]
    assert names == [each[3:] for each in STEPS] + ["place_updates", *generated, "place_early"]
    [page] = [each.read_text() for each in tmp_path.glob("graph-0/*-place_updates/after.txt")]
    assert page.count("fp8.update(") == 2 and page.count("fp8.encode(") == page.count("fp8.decode(") == 2
    assert "stored as codes" in (tmp_path / "graph-0" / "report.txt").read_text()


def test_golden_whole_step(tmp_path: Path) -> None:
    """Storage, the update and what it writes in place, behind ``place_updates``; plain operations are left out."""
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.Tanh())
    optimizer = fp8compile.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    recipe = Recipe(debug={"dump": str(tmp_path), "codegen": "eager"}, saved={"min_numel": 0})
    step = fp8compile.train_step(model, lambda net, x: net(x).square().mean(), optimizer, recipe=recipe)
    step(torch.randn(128, 64))
    [page] = [each.read_text() for each in tmp_path.glob("graph-0/*-place_updates/after.txt")]
    ours = [line for line in page.splitlines() if "fp8." in line or "copy_" in line or "of_optimizer" in line]
    assert_expected_inline(
        without_names("\n".join(ours)),
        """\
f32[4] = input
float8_e4m3fn[128, 64] = input
f32[128, 1] = input
uint8[128, 1] = input
f32[] = input
int8[128, 128], bf16[128, 1] = fp8.encode
f32[128, 128] = fp8.decode
f32[128, 64], float8_e4m3fn[128, 64], f32[128, 1], uint8[128, 1] = fp8.update
float8_e4m3fn[128, 64] = aten.copy_.default
f32[128, 1] = aten.copy_.default
uint8[128, 1] = aten.copy_.default
f32[128, 64] = aten.copy_.default
""",
    )
