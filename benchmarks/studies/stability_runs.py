"""One run of the stability ablation: a small transformer, an embedding of either kind, AdamW with states of either kind.

    states       fp32
                 dynamic, linear                       dynamic_tree, int8
                 ..., v to 0                           as in the 8-bit paper: a small v is rounded to 0; ours never is
    blocks       of 128, or one per tensor
    embedding    stable   fp8compile.optim.StableEmbedding: Xavier-uniform, LayerNorm, FP32 states
                 plain    N(0, 1 / hidden) times sqrt(hidden) as in fairseq; its states are encoded like any other's

A run *diverges* if a loss exceeds EXPLODED or is not finite (it is stopped there), or if at the end it is no better than
knowing how frequent each byte is: the mean loss of the last tenth above the entropy of single bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness.batches import text
from fp8compile.numerics.formats import INT8
from fp8compile.numerics.scaling import inv_scale_of, quantize
from fp8compile.numerics.states.dynamic_tree import DynamicTree, magnitude_of
from fp8compile.numerics.states.interface import GROUP, StateCodec, unit_and_amax
from fp8compile.numerics.states.plain import UINT8, Linear
from fp8compile.numerics.states.registry import state_codec
from fp8compile.optim import AdamW, StableEmbedding
from fp8compile.optim.placement import Placement

BYTES, HIDDEN, HEADS, LENGTH, ROWS = 256, 128, 4, 32, 8
EXPLODED = 100.0  # nats per byte; 5.5 is chance
TO_ZERO = ", v to 0"
FORMATS = {"fp32": "fp32", "dynamic": "dynamic_tree", "linear": "int8"}


@dataclass(frozen=True)
class Setting:
    """What varies from run to run, the state format apart."""

    lr: float
    eps: float = 1e-7
    beta1: float = 0.90
    beta2: float = 0.99
    stable: bool = False
    seed: int = 0


@dataclass(frozen=True)
class LinearToZero(Linear):
    """8-bit integers, rounded to nearest whatever becomes of small values."""

    def encode_groups(self, x_NG: Tensor) -> tuple[Tensor, ...]:
        inv_scale = inv_scale_of(x_NG.abs().amax(-1, keepdim=True), self.code)
        codes = (x_NG * inv_scale.reciprocal()).round() if self.code == UINT8 else x_NG
        return (codes.to(torch.uint8) if self.code == UINT8 else quantize(x_NG, inv_scale, self.code)), inv_scale


@dataclass(frozen=True)
class TreeToZero(DynamicTree):
    """The dynamic tree, rounded to nearest whatever becomes of small values."""

    def encode_groups(self, x_NG: Tensor) -> tuple[Tensor, ...]:
        codes, amax = super().encode_groups(x_NG)
        if self.signed:
            return codes, amax
        unit, _ = unit_and_amax(x_NG)
        return magnitude_of(unit, 8).to(torch.uint8), amax


@dataclass(frozen=True)
class AblationPlacement(Placement):
    """Codecs that the optimizers do not offer: one scale per tensor, a v that may become 0; all rounded to nearest."""

    tensorwise: bool = False
    to_zero: bool = False

    def codec(self, signed: bool, group_size: int | None = GROUP) -> StateCodec:
        size = None if self.tensorwise else group_size
        if self.to_zero:
            return LinearToZero(signed, size, INT8) if self.formats[0] == "int8" else TreeToZero(signed, size)
        return state_codec(self.formats[0 if signed else 1], signed=signed, group_size=size, rounding="nearest")


class AblationAdamW(AdamW):
    """AdamW whose encoded states are ``states``, in blocks or with one scale per tensor."""

    def __init__(self, model: nn.Module, states: str, tensorwise: bool, **options: Any) -> None:
        self.states, self.tensorwise = states, tensorwise
        super().__init__(model.parameters(), state_format=FORMATS[states.removesuffix(TO_ZERO)], **options)

    def placement(self, p: Tensor, group: Mapping[str, Any]) -> Placement:
        placed = super().placement(p, group)
        if set(placed.formats) == {"fp32"}:
            return placed
        return AblationPlacement(placed.formats, placed.reason, self.tensorwise, self.states.endswith(TO_ZERO))


class ScaledEmbedding(nn.Embedding):
    """fairseq's: N(0, 1 / hidden), the output times sqrt(hidden)."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.embedding_dim**-0.5)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * math.sqrt(self.embedding_dim)


class Block(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, HIDDEN))
        x = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return x


class SmallLM(nn.Module):
    """Bytes in, the next byte's logits out."""

    def __init__(self, stable: bool, layers: int = 1) -> None:
        super().__init__()
        self.tokens = StableEmbedding(BYTES, HIDDEN) if stable else ScaledEmbedding(BYTES, HIDDEN)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, HIDDEN))
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, BYTES)

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.blocks(self.tokens(ids) + self.positions)
        logits: Tensor = self.head(self.norm(x))
        return logits


def batches(seed: int, steps: int) -> Iterator[Tensor]:
    """int64 [rows, length + 1], from the standard library's source."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(text()) - LENGTH - 1, (ROWS,), generator=generator)
        yield text()[starts[:, None] + torch.arange(LENGTH + 1)]


def train(setting: Setting, states: str, tensorwise: bool, steps: int, compiled: bool) -> list[float]:
    """The losses of a run, up to one that has exploded. A tenth of the steps warm up; nothing is clipped."""
    torch.manual_seed(setting.seed)
    model = SmallLM(setting.stable)
    settings = {"lr": setting.lr, "betas": (setting.beta1, setting.beta2), "eps": setting.eps, "weight_decay": 0.0}
    optimizer = AblationAdamW(model, states, tensorwise, compiled=compiled, **settings)
    losses: list[float] = []
    for step, tokens in enumerate(batches(setting.seed, steps)):
        optimizer.param_groups[0]["lr"] = setting.lr * min(1.0, (step + 1) / (steps / 10))
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        losses.append(float(loss.detach()))
        if not losses[-1] <= EXPLODED:
            break
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def byte_entropy() -> float:
    """Nats per byte of one who knows how frequent each byte is, and nothing else."""
    share = torch.bincount(text(), minlength=BYTES).double() / len(text())
    return float(-(share * share.clamp_min(1e-300).log()).sum())


def final_loss(losses: list[float]) -> float:
    """The mean of the last tenth; NaN or inf where a loss was."""
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last)


def diverged(losses: list[float]) -> bool:
    return not (losses[-1] <= EXPLODED and final_loss(losses) <= byte_entropy())
