"""Decoder layers and whole models of given shapes, in plain torch: grouped-query attention by SDPA, rotary tables as input.

gated       RMSNorm, SwiGLU, no biases    Llama
not gated   LayerNorm, GELU, biases       GPT: the layer that Transformer Engine's documentation times

1 U = batch * length * hidden * 2 bytes
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """A model, or a layer of it."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    layers: int = 1
    vocabulary: int = 32000
    gated: bool = True

    @property
    def linear_weights(self) -> int:
        """Elements of one layer's linears."""
        attention = self.hidden * self.hidden * 2 + 2 * self.hidden * self.hidden * self.kv_heads // self.heads
        return attention + (3 if self.gated else 2) * self.hidden * self.ffn

    def layer_flops(self, batch: int, length: int) -> float:
        """Operations of one layer's forward: 2 per weight and token, and causal attention's two products, half of them."""
        return batch * length * (2.0 * self.linear_weights + 2.0 * length * self.hidden)


LLAMA2_7B = Shape(4096, 11008, 32, 32, 32)
LLAMA3_8B = Shape(4096, 14336, 32, 8, 32)
TE_LAYER = Shape(4096, 16384, 32, 32, gated=False)
LLAMA_1B = Shape(2048, 8192, 32, 8, 16)  # Llama-3.2-1B with a vocabulary of 32,000 and an output head of its own
TINY = Shape(128, 256, 2, 1, 2, 256)


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden, ffn, self.shape = shape.hidden, shape.ffn, shape
        bias = not shape.gated
        narrow = hidden * shape.kv_heads // shape.heads
        self.q, self.o = (nn.Linear(hidden, hidden, bias=bias) for _ in range(2))
        self.k, self.v = (nn.Linear(hidden, narrow, bias=bias) for _ in range(2))
        if shape.gated:
            self.gate = nn.Linear(hidden, ffn, bias=False)
        self.up, self.down = nn.Linear(hidden, ffn, bias=bias), nn.Linear(ffn, hidden, bias=bias)
        norm = nn.RMSNorm if shape.gated else nn.LayerNorm
        self.norm1, self.norm2 = norm(hidden, eps=1e-5), norm(hidden, eps=1e-5)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self._attention(self.norm1(x), cos, sin)
        y = self.norm2(x)
        if self.shape.gated:
            return x + self.down(F.silu(self.gate(y)) * self.up(y))
        return x + self.down(F.gelu(self.up(y), approximate="tanh"))

    def _attention(self, y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (self._by_head(linear(y)) for linear in (self.q, self.k, self.v))
        q, k = (t * cos + _rotated(t) * sin for t in (q, k))
        grouped = self.shape.kv_heads != self.shape.heads
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.o(attended.transpose(1, 2).reshape(y.shape))  # type: ignore[no-any-return]

    def _by_head(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], -1, self.shape.hidden // self.shape.heads).transpose(1, 2)


class Llama(nn.Module):
    """Embedding, layers, norm, output head; returns the loss of predicting each next token."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.lm_head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.lm_head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def initialised(module: nn.Module, deviation: float = 0.02) -> nn.Module:
    """Weights of linears and embeddings from a normal distribution, as GPT and Llama start."""
    for part in module.modules():
        if isinstance(part, (nn.Linear, nn.Embedding)):
            nn.init.normal_(part.weight, std=deviation)
    return module


def rotary_tables(shape: Shape, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin, ``[length, head]``."""
    width = shape.hidden // shape.heads
    speeds = 10000.0 ** (-torch.arange(0, width, 2, device=device) / width)
    angles = torch.arange(length, device=device)[:, None] * speeds.repeat(2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotated(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], -1)
