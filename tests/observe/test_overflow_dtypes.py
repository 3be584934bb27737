"""overflow_report in BF16, FP32, FP64 and with FP8 linears: on request, and at no cost where nobody asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8compile
from fp8compile.observe import records
from fp8compile.observe.history import ValueHistory
from tests.support.graphs import joint_of, text_of
from tests.support.measure import compiled

EAGER = {"debug.codegen": "eager", "fp32.observe": True}
FP8 = {"linears.emulate": True, "saved.min_numel": 0}


class Block(nn.Module):
    def __init__(self, size: int = 64) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(size), nn.Linear(size, 2 * size), nn.Linear(2 * size, size)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(F.silu(self.up(self.norm(x))))
        return y * self.gain


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def line_of(code: str) -> int:
    """The first line of this file that holds ``code``."""
    return next(i for i, line in enumerate(Path(__file__).read_text().splitlines(), 1) if code in line)


def first_of(dtype: torch.dtype, spoil: Any, options: dict[str, Any], scale: float = 1.0) -> tuple[ValueHistory, Any]:
    """Two good steps, then one in which a value is not finite; what the report names, and the model."""
    model = Blocks().to(dtype)
    run = compiled(model, **EAGER, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(32, 64).to(dtype)
    for step in (1, 2, 3):
        if step == 3:
            spoil(model)
        (run(x).double().mean() * (scale if step == 3 else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            assert fp8compile.tools.overflow_report(run).first is None
    report = fp8compile.tools.overflow_report(run)
    assert report.first is not None
    return report.first, report


DTYPES = [(torch.bfloat16, {}), (torch.float32, {}), (torch.float64, {}), (torch.bfloat16, FP8), (torch.float32, FP8)]
IDS = ["bf16", "f32", "f64", "bf16 with FP8 linears", "f32 with FP8 linears"]


@pytest.mark.parametrize(("dtype", "options"), DTYPES, ids=IDS)
def test_inf_in_the_forward(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Products of finite weights and data that are too large for their dtype."""

    def spoil(model: Any) -> None:
        model.blocks[1].up.weight.data.fill_(torch.finfo(dtype).max)
        model.blocks[1].norm.bias.data.fill_(8.0)

    first, report = first_of(dtype, spoil, options)
    assert (first.module, first.direction, first.first_step) == ("blocks.1.up", "forward", 3)
    assert f"test_overflow_dtypes.py:{line_of('self.up(self.norm(x))')}" in first.source
    assert first.op == "addmm.default" and first.dtype == {2: "bf16", 4: "f32", 8: "f64"}[dtype.itemsize]
    assert report.line.startswith("step 3: blocks.1.up (forward) addmm.default at test_overflow_dtypes.py:")


@pytest.mark.parametrize(("dtype", "options"), DTYPES, ids=IDS)
def test_nan_in_a_weight(dtype: torch.dtype, options: dict[str, Any]) -> None:
    first, _ = first_of(dtype, lambda m: m.blocks[0].down.weight.data[0, 0].fill_(torch.nan), options)
    assert (first.module, first.direction, first.first_step) == ("blocks.0.down", "forward", 3)
    assert first.at_first is not None and first.at_first.nan


@pytest.mark.parametrize(("dtype", "options"), [DTYPES[i] for i in (0, 1, 3, 4)], ids=[IDS[i] for i in (0, 1, 3, 4)])
def test_inf_in_the_backward_alone(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """A loss so steep that the gradient of a weight is inf, while the gradients that come in are finite."""

    def spoil(model: Any) -> None:
        model.blocks[0].gain.data.fill_(2.0**30)
        model.blocks[1].gain.data.fill_(2.0**90)

    first, report = first_of(dtype, spoil, options, scale=2.0**20)
    assert (first.direction, first.first_step) == ("backward", 3) and first.module.startswith("blocks.0")
    assert "test_overflow_dtypes.py:" in first.source and "(backward)" in report.line


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_off_the_graph_is_the_same_to_the_node(dtype: torch.dtype) -> None:
    """And "auto" is off where nothing is FP16: no input, no node, nothing observed."""
    texts = []
    for observe in (False, "auto", True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        graph = joint_of(
            Block().to(dtype), torch.randn(32, 64).to(dtype), **{"linears.emulate": True, "fp32.observe": observe}
        )
        texts.append(text_of(graph))
    assert texts[0] == texts[1] != texts[2] and "_counted" in texts[2] and "_counted" not in texts[1]
    model = Block().to(dtype)
    compiled(model, **{"debug.codegen": "eager", "fp32.observe": "auto"})(
        torch.randn(32, 64).to(dtype)
    ).sum().backward()
    assert records.of_model(model) == []
    with pytest.raises(ValueError, match=r"fp32\.observe=True"):
        fp8compile.tools.overflow_report(model)


def test_complex_numbers() -> None:
    class Rotated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(16, 16, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return (x.to(torch.complex64) @ self.w) @ self.w

    model = Rotated()
    run = compiled(model, **EAGER)
    for scale in (1.0, 1e38):
        model.w.data.mul_(scale)
        run(torch.randn(16, 16)).abs().sum().backward()
        for each in records.of_model(model):
            each.close()
    first = fp8compile.tools.overflow_report(run).first
    assert first is not None and (first.direction, first.first_step, first.dtype) == ("forward", 2, "complex64")


def test_what_no_fp32_number_holds_is_no_overflow_of_float64() -> None:
    model = nn.Linear(16, 16).double()
    run = compiled(model, **EAGER)
    with torch.no_grad():
        model.weight.fill_(1e200)
    run(torch.randn(8, 16).double().abs()).sum().backward()
    report = fp8compile.tools.overflow_report(run)
    assert report.first is None and max(a for layer in report.layers for _, a in layer.amax) > 1e199
