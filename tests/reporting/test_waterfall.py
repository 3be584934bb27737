"""From plain Inductor's bytes to ours: every byte has a line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fp8compile
from fp8compile.reporting.compiled_graph import GraphReport
from fp8compile.reporting.waterfall import CODES, CUT, ENCODED, RECOMPUTED, Amount, Waterfall, merged
from tests.support.measure import compiled, kept_bytes, llama_case


class Mlp(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.max_pool2d(torch.relu(self.norm(self.first(x))), 2))


class Regions(nn.Module):
    """Three calls of one region, and one in a checkpoint, whose values are made again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp() for _ in range(3))
        self.last = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.compiler.nested_compile_region(block)(x)
        return checkpoint(self.last, x, use_reentrant=False)


class Overwrites(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        y = torch.sigmoid(self.linear(x) + state)
        state.mul_(2)
        return y * y


def _cases() -> list[Any]:
    x = torch.randn(64, 64)
    return [
        pytest.param(Mlp(), (x,), {}, id="mlp"),
        pytest.param(Mlp(), (x,), {"linears.emulate": True}, id="linears"),
        pytest.param(Mlp(), (x,), {"saved": "off", "linears": "off"}, id="off"),
        pytest.param(Mlp().half(), (x.half(),), {"linears.emulate": True}, id="observed"),
        pytest.param(Convolutions(), (torch.randn(2, 3, 32, 32),), {}, id="convolutions"),
        pytest.param(Regions(), (x,), {}, id="regions"),
        pytest.param(Regions(), (x,), {"linears.emulate": True}, id="regions with linears"),
        pytest.param(Overwrites(), (x, torch.rand(64, 64)), {}, id="overwrites"),
    ]


@pytest.mark.parametrize(("model", "args", "options"), _cases())
def test_it_adds_up_to_the_byte(model: nn.Module, args: tuple[Tensor, ...], options: dict[str, Any]) -> None:
    report = fp8compile.explain(model, args, recipe={"saved.min_numel": 0, **options})
    changes, parts = report.waterfall.changes, report.waterfall.parts
    assert report.saved_bytes > 0
    assert report.saved_bytes_plain + sum(c.nbytes for c in changes) == report.saved_bytes
    assert sum(p.nbytes for p in parts) == report.saved_bytes
    assert all(p.nbytes > 0 for p in parts), "no part is a correction of another"


def test_each_line_is_what_its_pass_did() -> None:
    layer, args = llama_case(seq=64, hidden=128, ffn=344)
    fn = compiled(layer, linears="off", **{"saved.min_numel": 0})
    kept = kept_bytes(layer, fn, args)
    report = fp8compile.report(fn)
    lines = {amount.label: amount for amount in (*report.waterfall.changes, *report.waterfall.parts)}
    assert report.saved_bytes == kept
    assert lines[ENCODED].nbytes == sum(s.bytes_after - s.bytes_before for s in report.saved)
    assert lines[ENCODED].tensors == len(report.saved)
    assert lines[CODES].nbytes == sum(s.bytes_after for s in report.saved)
    by_cut = [r for r in report.recomputed if not r.sources]
    assert lines[CUT].tensors == len(by_cut) and -lines[CUT].nbytes <= sum(r.bytes_before for r in by_cut)
    again = lines.get(RECOMPUTED, Amount(RECOMPUTED, 0))
    assert again.tensors == len(report.recomputed) - len(by_cut)
    for skip in report.skips:
        assert skip.bytes == 0 or skip.reason in lines


def test_a_graph_that_runs_three_times_counts_three_times() -> None:
    once = GraphReport("training", waterfall=Waterfall((Amount("a", -5, 1),), (Amount("b", 3, 2),)))
    thrice = once.waterfall * 3
    assert thrice == Waterfall((Amount("a", -15, 3),), (Amount("b", 9, 6),))
    assert once.waterfall + thrice == Waterfall((Amount("a", -20, 4),), (Amount("b", 12, 8),))
    assert merged((Amount("a", 1), Amount("b", 0), Amount("a", -1))) == ()
