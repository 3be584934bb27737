"""``saved="exact"``, and the presets that have it: what is saved takes fewer bytes, and no number changes, to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8compile
from fp8compile.reporting.report import Report
from fp8compile.saved.judge import ROUNDS
from tests.support.budgets import Gated
from tests.support.measure import compiled, llama_case


class Chosen(nn.Module):
    """A mask that no seed makes again, indices that are small, a norm and a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(64, 64), nn.Linear(64, 64), nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.a(x))
        kept = torch.where(h.cumsum(0) > 0, h.exp(), 0.1 * h)
        return self.b(kept.softmax(-1)).gather(1, h.detach().argmax(1, keepdim=True))


class Dropped(Chosen):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.3))


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(F.max_pool2d(self.norm(self.a(x)), 2)).flatten(1)


CASES: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "masks and indices": lambda: (Chosen(), (torch.randn(256, 64),)),
    "dropout": lambda: (Dropped(), (torch.randn(256, 64),)),
    "pooled": lambda: (Pooled(), (torch.randn(4, 3, 34, 34),)),
    "llama": lambda: llama_case(seq=64, hidden=64, ffn=128),
    "llama, BF16": lambda: llama_case(seq=64, hidden=64, ffn=128, dtype=torch.bfloat16),
}


def step(model: nn.Module, args: tuple[Tensor, ...], **options: object) -> tuple[list[Tensor], Report]:
    """Result and gradients of a step from one seed, and the report."""
    torch._dynamo.reset()
    model = copy.deepcopy(model)
    fn = compiled(model, **{"saved.min_numel": 0, **options})
    torch.manual_seed(7)
    out = fn(*args)
    out.float().square().mean().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(gradients) == len(list(model.parameters()))
    return [out.detach(), *gradients], fp8compile.report(fn)


@pytest.mark.parametrize(
    ("name", "codegen", "preset"),
    [
        *((name, "eager", "exact") for name in CASES),
        ("pooled", "inductor", "exact"),
        ("llama, BF16", "inductor", "exact"),
        ("llama, BF16", "eager", "speed"),
    ],
)
def test_no_number_changes(name: str, codegen: str, preset: str) -> None:
    """On a CPU "speed" has no FP8 linears, and no rates to price codes with: it is "exact" there. Where Inductor fuses
    another cut otherwise, as with masks and indices, its kernels add up in another order."""
    model, args = CASES[name]()
    options = {"debug.codegen": codegen, "fp32.observe": False}
    plain, _ = step(model, args, preset="off", **options)
    ours, report = step(model, args, preset=preset, **options)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    assert report.saved_bytes <= report.saved_bytes_plain


def test_what_is_stored_and_what_is_left() -> None:
    _, report = step(*CASES["masks and indices"](), preset="exact", **{"debug.codegen": "eager"})
    assert {(each.info.dtype, each.codec) for each in report.saved} == {
        ("bool", "bits"),
        ("int64", "uint8, which holds all of them"),
    }
    floats = [skip.reason for skip in report.skips if skip.info.dtype == "f32"]
    assert ROUNDS in floats and not [each for each in report.saved if each.info.dtype == "f32"]
    assert report.saved_bytes < report.saved_bytes_plain


def test_a_module_may_be_exact_beside_codes() -> None:
    layer, args = llama_case(seq=64, hidden=64, ffn=128)
    _, report = step(layer, args, linears="off", modules={"gate": "exact"}, **{"debug.codegen": "eager"})
    exact = {skip.info.origin.module for skip in report.skips if skip.reason == ROUNDS}
    stored = {each.info.origin.module for each in report.saved}
    assert exact == {"gate"} and stored and "gate" not in stored


def test_memory_computes_again_and_rounds_no_more_than_the_default() -> None:
    """Gates and ups are made again by their matmuls."""
    model, x = Gated(4, 64), torch.randn(512, 64)
    _, default = step(model, (x,), **{"debug.codegen": "eager"})
    _, less = step(model, (x,), preset="memory", **{"debug.codegen": "eager"})
    assert less.saved_bytes < default.saved_bytes
    assert {each.codec for each in less.saved} <= {each.codec for each in default.saved}
