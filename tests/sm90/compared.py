"""The models whose emulated graph is compared with the one put onto an H100, small: how each is made, and run to a loss."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.measure import LlamaLayer

from .layers import ENCODERS

WIDTH, HEADS = 128, 2
TOKENS = (2, 64, WIDTH)


def in_bf16(make: Callable[[], nn.Module]) -> nn.Module:
    return make().bfloat16()


def of_tokens() -> tuple[Tensor, ...]:
    return (torch.randn(TOKENS).bfloat16().requires_grad_(),)


def summed(model: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    return model(*inputs).sum()


@dataclass(frozen=True)
class Case:
    """A model, what it is called with, and how a loss is made of it."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]] = of_tokens
    loss: Callable[..., Tensor] = summed


class Stack(nn.Module):
    """Three blocks, each in a checkpointed region unless ``checkpointed`` is off."""

    def __init__(self, make: Callable[[], nn.Module], checkpointed: bool = True) -> None:
        super().__init__()
        self.blocks, self.checkpointed = nn.ModuleList(make() for _ in range(3)), checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


class Mlp(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(F.gelu(self.up(self.norm(x))), self.dropout)
        return x + F.dropout(self.down(y), self.dropout)


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 8, bias=False), nn.Linear(8, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x.tanh()) + self.b(self.a(x.tanh()))
        return y


class GPT2Layer(nn.Module):
    """Pre-norm, one linear for q, k and v, causal attention, tanh-GELU, dropout on both branches."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (_by_head(part) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + F.dropout(self.o(mixed), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")), 0.1)


def _by_head(x: Tensor) -> Tensor:
    return x.view(x.shape[0], x.shape[1], HEADS, -1).transpose(1, 2)


class Experts(nn.Module):
    """A SwiGLU of four experts, as Mixtral's: each takes every token, and the router's two largest weights count."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 4, bias=False)
        self.gates, self.ups, self.downs = (
            nn.ModuleList(nn.Linear(i, o, bias=False) for _ in range(4))
            for i, o in ((WIDTH, 2 * WIDTH), (WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH))
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        weights, chosen = self.router(y).float().softmax(-1).topk(2, -1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        for i, (gate, up, down) in enumerate(zip(self.gates, self.ups, self.downs, strict=True)):
            share = (weights * (chosen == i)).sum(-1, keepdim=True)
            x = x + share * down(F.silu(gate(y)) * up(y))
        return x


class ResNetBlock(nn.Module):
    """Convolution, BatchNorm, ReLU, twice, and the input added before the last ReLU."""

    def __init__(self, channels: int = 64) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(y)))


def resnet(channels_last: bool) -> Case:
    order = torch.channels_last if channels_last else torch.contiguous_format

    def make() -> nn.Module:
        return nn.Sequential(ResNetBlock(), ResNetBlock()).bfloat16().to(memory_format=order)

    def inputs() -> tuple[Tensor, ...]:
        return (torch.randn(4, 64, 16, 16).bfloat16().to(memory_format=order).requires_grad_(),)

    return Case(make, inputs)


def llama_inputs() -> tuple[Tensor, ...]:
    return (*of_tokens(), *(torch.randn(TOKENS[1], WIDTH // HEADS).bfloat16() for _ in range(2)))


def hf(kind: str, autocast: bool = False, **options: Any) -> Case:
    """A small model of transformers with its own loss; ``checkpointing`` by its own switch."""

    def make() -> nn.Module:
        import transformers

        sizes = {"vocab_size": 256, "use_cache": False, **HF_SIZES[kind]}
        model = getattr(transformers, kind)(getattr(transformers, HF_CONFIGS[kind])(**sizes)).train()
        model.loss_type = model.loss_type or "ForCausalLM"  # GPT-2's name has none: a warning that breaks the graph
        if options.get("checkpointing"):
            model.gradient_checkpointing_enable()
        return model if autocast else model.bfloat16()

    def loss(model: Callable[..., Any], tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found: Tensor = model(input_ids=tokens, labels=tokens).loss
        return found

    return Case(make, lambda: (torch.randint(0, 256, TOKENS[:2]),), loss)


_LLAMA = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
}
HF_SIZES: Mapping[str, dict[str, int]] = {
    "LlamaForCausalLM": _LLAMA,
    "MixtralForCausalLM": {**_LLAMA, "num_local_experts": 4},
    "BertForMaskedLM": {k: v for k, v in _LLAMA.items() if k != "num_key_value_heads"},
    "GPT2LMHeadModel": {"n_embd": WIDTH, "n_layer": 2, "n_head": HEADS},
}
HF_CONFIGS = {
    "LlamaForCausalLM": "LlamaConfig",
    "MixtralForCausalLM": "MixtralConfig",
    "BertForMaskedLM": "BertConfig",
    "GPT2LMHeadModel": "GPT2Config",
}


class Chosen(nn.Module):
    """A mask that the backward cannot make again, of a linear's result."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.score = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.score.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.value(x)
        return torch.where(self.score(x) > 0, h, 0.1 * h)


class Picked(Chosen):
    """An element of each row, at the place where another linear is largest."""

    def forward(self, x: Tensor) -> Tensor:
        return self.value(x).gather(-1, self.score(x).argmax(-1, keepdim=True))


def encoder(kind: str) -> nn.Module:
    return ENCODERS[kind](WIDTH, 4 * WIDTH, HEADS)


def _blocks(make: Callable[[], nn.Module], checkpointed: bool | None = None) -> Case:
    made = make if checkpointed is None else functools.partial(Stack, make, checkpointed)
    return Case(functools.partial(in_bf16, made))


CASES: Mapping[str, Case] = {
    "mlp, checkpointed": _blocks(Mlp, True),
    "mlp, dropout": _blocks(functools.partial(Mlp, 0.1)),
    "mlp, dropout, checkpointed": _blocks(functools.partial(Mlp, 0.1), True),
    "lora": _blocks(Lora),
    "chosen by a mask": _blocks(Chosen),
    "picked by place": _blocks(Picked),
    "vit": _blocks(functools.partial(encoder, "vit")),
    "vit, checkpointed": _blocks(functools.partial(encoder, "vit"), True),
    "bert": _blocks(functools.partial(encoder, "bert")),
    "gpt2": _blocks(GPT2Layer),
    "llama": Case(functools.partial(in_bf16, lambda: LlamaLayer(WIDTH, 3 * WIDTH, HEADS)), llama_inputs),
    "experts": _blocks(Experts),
    "resnet": resnet(False),
    "resnet, channels last": resnet(True),
    "hf llama": hf("LlamaForCausalLM"),
    "hf llama, checkpointing": hf("LlamaForCausalLM", checkpointing=True),
    "hf bert, dropout, autocast": hf("BertForMaskedLM", autocast=True),
    "hf gpt2, dropout, autocast": hf("GPT2LMHeadModel", autocast=True),
    "hf mixtral": hf("MixtralForCausalLM"),
}
