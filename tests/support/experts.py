"""A layer of experts as Transformers computes it: tokens sorted by expert, grouped matmuls, weighed, and put back."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Experts(nn.Module):
    """A router that sends each token to ``k`` of ``experts`` gated MLPs.

    ``chosen`` says which, where the router is not to; its weights are the router's all the same.
    """

    def __init__(self, experts: int = 4, k: int = 2, hidden: int = 64, inner: int = 96) -> None:
        super().__init__()
        self.k = k
        self.norm = nn.RMSNorm(hidden)
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * inner, hidden) / hidden**0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, inner) / inner**0.5)

    def forward(self, x: Tensor, chosen: Tensor | None = None) -> Tensor:
        h = self.norm(x)
        wide = torch.float64 if x.dtype is torch.float64 else torch.float32
        probability = self.gate(h).softmax(-1, dtype=wide)
        top, found = probability.topk(self.k, -1)
        if chosen is not None:
            top, found = probability.gather(1, chosen), chosen
        expert, order = torch.sort(found.reshape(-1))
        rows, weights = h[order // self.k], top.reshape(-1)[order]
        count = torch.histc(expert.float(), bins=self.gate_up.shape[0], min=0, max=self.gate_up.shape[0] - 1)
        ends = count.cumsum(0, dtype=torch.int32)
        gate, up = self.multiply(rows, self.gate_up.transpose(1, 2), ends).chunk(2, -1)
        y = self.multiply(F.silu(gate) * up, self.down.transpose(1, 2), ends)
        back = torch.empty_like(order).index_put((order,), torch.arange(order.numel()))
        return x + self.weigh(y, weights.unsqueeze(-1))[back].view(*x.shape[:1], self.k, -1).sum(1).to(x.dtype)

    def weigh(self, y: Tensor, weights: Tensor) -> Tensor:
        return y * weights

    def multiply(self, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        if rows.dtype is torch.bfloat16:
            return F.grouped_mm(rows, weight, offs=ends)
        starts = [0, *ends.tolist()]  # float64, as a reference
        parts = [rows[a:b] @ w for (a, b), w in zip(pairwise(starts), weight, strict=True)]
        return torch.cat(parts)


def experts_case(tokens: int = 128, seed: int = 0, **sizes: Any) -> tuple[Experts, Tensor]:
    """The layer in BF16, and its input."""
    torch.manual_seed(seed)
    layer = Experts(**sizes).bfloat16()
    return layer, torch.randn(tokens, layer.gate.in_features).bfloat16().requires_grad_()


def any_experts(layer: Experts, tokens: int) -> Tensor:
    """``[tokens, k]``: different experts for each token."""
    return torch.rand(tokens, layer.gate.out_features).argsort(-1)[:, : layer.k]


class Grouped(nn.Module):
    """A grouped matmul alone, of rows that the caller has sorted."""

    def __init__(self, experts: int = 4, hidden: int = 32, inner: int = 48) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, inner, hidden).bfloat16() / hidden**0.5)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        if x.dtype is torch.float64:
            parts = zip(torch.tensor_split(x, ends[:-1].long()), self.weight, strict=True)
            return torch.cat([part @ w.t() for part, w in parts])
        return F.grouped_mm(x, self.weight.transpose(1, 2), offs=ends)


def ends_at(*ends: int) -> Tensor:
    return torch.tensor(ends, dtype=torch.int32)


def rows_of(tokens: int, hidden: int = 32) -> Tensor:
    torch.manual_seed(2)
    return torch.randn(tokens, hidden).bfloat16().requires_grad_()
