"""A small model whose passes are shown, step by step."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

import fp8compile
from fp8compile import Recipe
from fp8compile.fx.snapshot import PassStep

# Passes that run on every model, in their order.
NAMES = [
    "spell_out_alpha",
    "share_casts",
    "quantize_linears",
    "chunk_logits",
    "cut_for_bytes",
    "save_sums",
    "recompute_kept",
    "save_softmax",
    "save_normalised",
    "recompute_for_budget",
    "encode_saved",
]
CUT = NAMES.index("cut_for_bytes")  # so many run on the joint graph
LATE = ["call_codecs", "sum_bias_gradients", "store_residuals", "store_sums"]  # where code is generated: on each half
STEPS = [f"{number:02}-{name}" for number, name in enumerate(NAMES, 1)]
GENERATED = [f"{number:02}-{name}" for number, name in enumerate(LATE + LATE, len(NAMES) + 1)]


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
