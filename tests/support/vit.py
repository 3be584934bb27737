"""A tiny pre-norm vision transformer, written out so that every operation has a line of its own."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(batch, length, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-1, -2) * (dim // self.heads) ** -0.5
        mixed = torch.softmax(scores, -1) @ v
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, dim))
        h = F.gelu(self.up(self.norm2(x)))
        return x + self.down(h)

    @torch.no_grad()
    def make_unstable(self, k: float = 1e4) -> None:
        """Weights of the MLP times k: what ``up`` makes still fits FP16, what ``down`` makes does not."""
        self.up.weight.mul_(k)
        self.down.weight.mul_(k / 100)


class ViT(nn.Module):
    def __init__(self, dim: int = 16, depth: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, 4)
        self.blocks = nn.ModuleList(Block(dim, 2) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def line_of(code: str) -> int:
    """The line of this file that holds ``code`` within a forward."""
    lines = Path(__file__).read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if code in line and "nn." not in line)
