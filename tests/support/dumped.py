"""A small model whose passes are shown, step by step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fp8compile
from fp8compile import Recipe
from fp8compile.fx.snapshot import Step

STEPS = [
    *("01-share_casts", "02-quantize_linears", "03-chunk_logits", "04-cut_for_bytes"),
    *("05-save_sums", "06-recompute_kept", "07-save_normalised", "08-recompute_for_budget", "09-encode_saved"),
]


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.down = (nn.Linear(64, 64, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.gate(x)))


def explained(recipe: Recipe | None = None) -> tuple[Step, ...]:
    report = fp8compile.explain(Gated(), (torch.randn(128, 64),), recipe=recipe or Recipe(min_saved_numel=0))
    return report.graphs[0].steps
