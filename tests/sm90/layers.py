"""The layers that are lowered, at the sizes of real models: their modules, arguments and pipelines.

    Llama    RMSNorm, rotary causal attention, RMSNorm, SwiGLU; no biases      tests/support/measure.py
    BERT     attention and GELU block, LayerNorm behind each (post-norm)
    ViT      attention and GELU block, LayerNorm before each (pre-norm)
    linear   one product forward, two backward: no producer or consumer to fuse with

Attention is F.scaled_dot_product_attention without mask or dropout: flash attention on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8compile.recipe.recipe import Recipe
from tests.support.measure import LlamaLayer

PLAIN, STORAGE, CONSERVATIVE, LINEARS, BOTH = "inductor", "storage_only", "storage_16bit_attention", "linears", "both"
ALL_CODES = "all_codes"  # BOTH, but linears that FP8 is predicted to slow down stay
DEFAULT = "default"  # and what codes are predicted to take longer for than it is worth
SPEED = "speed"  # or than a fifth of that
STORAGE_WORTH, STORAGE_SPEED = "storage_worth", "storage_speed"  # STORAGE at the same shares
ROWS = "storage_16bit_attention_rows"  # CONSERVATIVE with a group for each row of BASE: one kernel with a norm's sums
LINEARS_CACHED = "linears_cached"  # LINEARS, but weights come encoded
DELAYED = "linears_delayed"  # LINEARS with scales known before their tensors
CACHED = "linears_delayed_cached"  # and weights that come encoded
MERGED = "linears_delayed_cached_merged"  # and one dgrad for q, k and v, one for gate and up
BOTH_CACHED = "both_16bit_attention_delayed_cached"  # CACHED and CONSERVATIVE
BOTH_MERGED = "both_16bit_attention_delayed_cached_merged"  # MERGED and CONSERVATIVE
ON_AN_H200 = {"device_rates": "h200"}  # whose kernels were read, so that times are predicted for it
RECIPES: Mapping[str, Recipe] = {
    STORAGE: Recipe(linears="off"),
    CONSERVATIVE: Recipe(linears="off", saved={"attention": False}),
    ROWS: Recipe(linears="off", saved={"attention": False, "group_size": 768}),
    LINEARS: Recipe(linears="tensorwise", saved="off"),
    BOTH: Recipe(linears="tensorwise"),
    ALL_CODES: Recipe(saved={"max_cost": "any"}, debug=ON_AN_H200),
    DEFAULT: Recipe(debug=ON_AN_H200),
    SPEED: Recipe.preset("speed", debug=ON_AN_H200),
    STORAGE_WORTH: Recipe(linears="off", debug=ON_AN_H200),
    STORAGE_SPEED: Recipe.preset("speed", linears="off", debug=ON_AN_H200),
    LINEARS_CACHED: Recipe(linears={"mode": "tensorwise", "cache_weights": True}, saved="off"),
    DELAYED: Recipe(linears={"mode": "tensorwise", "scaling": "delayed"}, saved="off"),
    CACHED: Recipe(linears={"mode": "tensorwise", "scaling": "delayed", "cache_weights": True}, saved="off"),
    MERGED: Recipe(
        linears={"mode": "tensorwise", "scaling": "delayed", "cache_weights": True, "merge_dgrads": True}, saved="off"
    ),
    BOTH_CACHED: Recipe(
        linears={"mode": "tensorwise", "scaling": "delayed", "cache_weights": True}, saved={"attention": False}
    ),
    BOTH_MERGED: Recipe(
        linears={"mode": "tensorwise", "scaling": "delayed", "cache_weights": True, "merge_dgrads": True},
        saved={"attention": False},
    ),
}


@dataclass(frozen=True)
class Layer:
    """A layer and the shape of its input ``[batch, seq, hidden]``."""

    kind: str
    batch: int
    seq: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int | None = None

    @property
    def tokens(self) -> int:
        return self.batch * self.seq

    @property
    def unit(self) -> int:
        """Bytes of the layer's input in BF16."""
        return 2 * self.tokens * self.hidden

    def build(self, device: str | None = None) -> nn.Module:
        """The module, in FP32, its weights drawn from torch's generator."""
        with torch.device(device or "cpu"):
            if self.kind == "llama":
                return LlamaLayer(self.hidden, self.ffn, self.heads, self.kv_heads)
            if self.kind == "linear":
                return nn.Linear(self.hidden, self.ffn, bias=False)
            return ENCODERS[self.kind](self.hidden, self.ffn, self.heads)

    def empty(self) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """Module and arguments in BF16, uninitialised: real sizes for nothing."""
        module = self.build("meta").bfloat16().to_empty(device="cpu")
        return module, self.arguments(lambda *shape: torch.empty(shape, dtype=torch.bfloat16))

    def arguments(self, values: Callable[..., Tensor] = torch.randn) -> tuple[Tensor, ...]:
        """What the module is called with, each tensor made by ``values(*shape)``; the first takes a gradient."""
        x = values(self.batch, self.seq, self.hidden).requires_grad_()
        tables = (values(self.seq, self.hidden // self.heads) for _ in range(2))
        return (x, *tables) if self.kind == "llama" else (x,)


class Encoder(nn.Module):
    """Attention and a GELU block, every linear with a bias; ``pre_norm`` says where the LayerNorms stand."""

    pre_norm: bool
    attention_dropout = 0.0

    def __init__(self, hidden: int, ffn: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)

    def forward(self, x: Tensor) -> Tensor:
        if self.pre_norm:
            x = x + self.attended(self.norm1(x))
            return x + self.mlp(self.norm2(x))
        x = self.norm1(x + self.attended(x))
        y: Tensor = self.norm2(x + self.mlp(x))
        return y

    def attended(self, x: Tensor) -> Tensor:
        batch, seq, hidden = x.shape
        q, k, v = (linear(x).view(batch, seq, self.heads, -1).transpose(1, 2) for linear in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attention_dropout)
        result: Tensor = self.o(mixed.transpose(1, 2).reshape(batch, seq, hidden))
        return result

    def mlp(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


class BertLayer(Encoder):
    pre_norm = False


class ViTBlock(Encoder):
    pre_norm = True


ENCODERS = {"bert": BertLayer, "vit": ViTBlock}

LLAMA_2_7B = {"hidden": 4096, "ffn": 11008, "heads": 32}
BASE = {"hidden": 768, "ffn": 3072, "heads": 12}  # BERT-base and ViT-base
CASES: Mapping[str, Layer] = {
    "llama 2k": Layer("llama", 1, 2048, **LLAMA_2_7B),
    "llama 16k": Layer("llama", 8, 2048, **LLAMA_2_7B),
    "bert 2k": Layer("bert", 4, 512, **BASE),
    "bert 16k": Layer("bert", 32, 512, **BASE),
    "vit 2k": Layer("vit", 8, 256, **BASE),
    "vit 16k": Layer("vit", 64, 256, **BASE),
    "linear 2k": Layer("linear", 1, 2048, **LLAMA_2_7B),
    "linear 16k": Layer("linear", 8, 2048, **LLAMA_2_7B),
}
