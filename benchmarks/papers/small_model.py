"""A transformer of bytes for ablations: pre-norm, causal, positions learned, GELU; with either kind of embedding.

    stable   fp8compile.optim.StableEmbedding: Xavier-uniform, LayerNorm, FP32 states
    plain    N(0, 1 / hidden) times sqrt(hidden) as in fairseq; its states are encoded like any other's

Plain PyTorch, so that each ablation can put its own activation or linear layer in. Bytes are those of Python's own source.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8compile.extras.demo.data import load_corpus
from fp8compile.optim import StableEmbedding

BYTES, HIDDEN, HEADS, LENGTH, ROWS = 256, 128, 4, 32, 8
Linear = Callable[[int, int], nn.Module]
Activation = Callable[[Tensor], Tensor]


class ScaledEmbedding(nn.Embedding):
    """fairseq's: N(0, 1 / hidden), the output times sqrt(hidden)."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.embedding_dim**-0.5)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * math.sqrt(self.embedding_dim)


class Block(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, linear: Linear = nn.Linear, activation: Activation = F.gelu) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = linear(HIDDEN, 3 * HIDDEN), linear(HIDDEN, HIDDEN)
        self.up, self.down = linear(HIDDEN, 4 * HIDDEN), linear(4 * HIDDEN, HIDDEN)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, HIDDEN))
        x = x + self.down(self.activation(self.up(self.norm_2(x))))
        return x


class SmallLM(nn.Module):
    """Bytes in, the next byte's logits out.

    Args:
        stable: the embedding.
        layers: how many blocks.
        linear, activation: of the blocks; the head is always exact.
    """

    def __init__(
        self, stable: bool, layers: int = 1, linear: Linear = nn.Linear, activation: Activation = F.gelu
    ) -> None:
        super().__init__()
        self.tokens = StableEmbedding(BYTES, HIDDEN) if stable else ScaledEmbedding(BYTES, HIDDEN)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, HIDDEN))
        self.blocks = nn.Sequential(*(Block(linear, activation) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, BYTES)

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.blocks(self.tokens(ids) + self.positions)
        logits: Tensor = self.head(self.norm(x))
        return logits


@functools.cache
def training_text() -> Tensor:
    """The bytes that models are trained on, uint8."""
    return load_corpus().train


@functools.cache
def held_out_text() -> Tensor:
    """The bytes of the files that are held out, uint8."""
    return load_corpus().validation


def batches(text: Tensor, seed: int, steps: int, rows: int = ROWS) -> Iterator[Tensor]:
    """int64 [rows, length + 1] at seeded random places."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH - 1, (rows,), generator=generator)
        yield text[starts[:, None] + torch.arange(LENGTH + 1)].long()


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Nats per byte, FP32 from logits of any dtype."""
    logits = model(tokens[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: nn.Module, windows: int = 1024) -> float:
    """Nats per byte on the same windows of the files held out, whatever the model."""
    parts = batches(held_out_text(), 0, max(1, windows // 128), rows=min(windows, 128))
    losses = [float(loss_of(model, tokens)) for tokens in parts]
    return sum(losses) / len(losses)


def fit(
    model: nn.Module,
    seed: int,
    steps: int,
    rate: float = 3e-3,
    optimizer: torch.optim.Optimizer | None = None,
    rows: int = ROWS,
) -> list[float]:
    """Train on ``steps`` batches; returns the losses. A tenth of the steps warm up, then the rate falls linearly to a tenth.

    Args:
        optimizer: AdamW with betas 0.9 and 0.99, if none is given.
    """
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.01)
    losses = []
    for step, tokens in enumerate(batches(training_text(), seed, steps, rows)):
        warm = min(1.0, (step + 1) / max(1.0, steps / 10))
        for group in optimizer.param_groups:
            group["lr"] = rate * warm * (1 - 0.9 * step / steps)
        loss = loss_of(model, tokens)
        losses.append(float(loss.detach()))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return losses


def byte_entropy(text: Tensor) -> float:
    """Nats per byte of one who knows how frequent each byte is, and nothing else."""
    share = torch.bincount(text, minlength=BYTES).double() / len(text)
    return float(-(share * share.clamp_min(1e-300).log()).sum())
