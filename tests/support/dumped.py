"""A small model whose passes are shown, step by step."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

import fp8compile
from fp8compile import Recipe
from fp8compile.fx.snapshot import PassStep

STEPS = [
    *("01-spell_out_alpha", "02-share_casts", "03-quantize_linears", "04-chunk_logits", "05-cut_for_bytes"),
    *("06-save_sums", "07-recompute_kept", "08-save_softmax", "09-save_normalised", "10-recompute_for_budget"),
    "11-encode_saved",
]
GENERATED = [  # where code is generated: on the forward, then on the backward
    *("12-sum_bias_gradients", "13-store_residuals", "14-sum_bias_gradients", "15-store_residuals"),
]


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.down = (nn.Linear(64, 64, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.gate(x)))


def explained(recipe: Recipe | None = None) -> tuple[PassStep, ...]:
    report = fp8compile.explain(Gated(), (torch.randn(128, 64),), recipe=recipe or Recipe(saved={"min_numel": 0}))
    return report.graphs[0].steps


def without_names(page: str) -> str:
    """Results and calls of a dumped page, a line each: names of values, symbols, source lines differ from torch to torch."""
    lines = (line.split("  #")[0].rstrip() for line in page.splitlines() if ": " in line and " = " in line)
    parts = (re.fullmatch(r".*?: (.*?) = ([\w.]+)(?:\(.*\))?", line) for line in lines)
    return "".join(re.sub(r"\bs\d+\b", "s", f"{part[1]} = {part[2]}\n") for part in parts if part)
