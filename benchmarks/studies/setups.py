"""Set-ups as people have them: checkpointed, with adapters, with dropout, with experts, with another library's kernel, with a
preference loss. Each in a size that a CPU runs in seconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY, TOKENS, WIDTH = 512, (4, 128), 256
SIZES = {
    "hidden_size": WIDTH,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
}
ENCODER = {"hidden_size": WIDTH, "intermediate_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 4}
EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

Run = Callable[[Callable[..., Any]], Tensor]


@dataclass(frozen=True)
class SetUp:
    """A model and its loss.

    Attributes:
        make: the model; call it twice with the same seed for the same weights.
        loss: of a model, compiled or not, on the set-up's batch.
        goal: the share of plain Inductor's bytes that may be kept for the backward.
        options: of the backend.
    """

    make: Callable[[], nn.Module]
    loss: Run
    goal: float
    options: Mapping[str, Any] = field(default_factory=dict)


def tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, TOKENS, generator=torch.Generator().manual_seed(0))


def language_loss(model: Callable[..., Any]) -> Tensor:
    found: Tensor = model(input_ids=tokens(), labels=tokens()).loss
    return found


def under_autocast(model: Callable[..., Any]) -> Tensor:
    is_exact = next(model.parameters()).dtype is torch.float64  # type: ignore[attr-defined]
    with torch.autocast("cpu", torch.bfloat16, enabled=not is_exact):
        return language_loss(model)


def squares(*shape: int) -> Run:
    def loss(model: Callable[..., Any]) -> Tensor:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
        y: Tensor = model(x.to(next(model.parameters()).dtype))  # type: ignore[attr-defined]
        return (y if y.dtype is torch.float64 else y.float()).square().mean()

    return loss


def llama() -> nn.Module:
    import transformers

    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))  # type: ignore[no-any-return]


def checkpointed(model: Any) -> nn.Module:
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    return model.train()  # type: ignore[no-any-return]


def with_adapters(model: nn.Module, dropout: float, modules: list[str]) -> nn.Module:
    import peft

    config = peft.LoraConfig(r=16, target_modules=modules, lora_dropout=dropout, init_lora_weights="gaussian")
    return peft.get_peft_model(model, config)  # type: ignore[no-any-return,arg-type]


def mixtral() -> nn.Module:
    import transformers

    config = transformers.MixtralConfig(**{**SIZES, "num_hidden_layers": 2}, num_local_experts=4)
    return transformers.MixtralForCausalLM(config)  # type: ignore[no-any-return]


def bert() -> nn.Module:
    import transformers

    config = transformers.BertConfig(**ENCODER, vocab_size=VOCABULARY)
    return transformers.BertForMaskedLM(config).train()  # type: ignore[no-any-return]


def gpt2() -> nn.Module:
    import transformers

    config = transformers.GPT2Config(n_embd=WIDTH, n_layer=3, n_head=4, vocab_size=VOCABULARY)
    return transformers.GPT2LMHeadModel(config).train()  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@torch.library.custom_op("fp8compile_setups::attention", mutates_args=())
def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As another library's kernel: what it computes is not in the graph."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).clone()


@torch.library.custom_op("fp8compile_setups::attention_backward", mutates_args=())
def attention_backward(g: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    q_, k_, v_, g_ = (t.to(wide) for t in (q, k, v, g))
    scale = q.shape[-1] ** -0.5
    masked = torch.ones(q.shape[-2:-1] * 2, dtype=torch.bool).triu(1)
    p = (q_ @ k_.mT * scale).masked_fill(masked, -math.inf).softmax(-1)
    dp = g_ @ v_.mT
    ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * scale
    dq, dk, dv = ds @ k_, ds.mT @ q_, p.mT @ g_
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.empty_like(q)


@attention_backward.register_fake
def _(g: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


attention.register_autograd(
    lambda ctx, g: attention_backward(g.contiguous(), *ctx.saved_tensors), setup_context=_keep
)


class OpaqueBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = (t.unflatten(-1, (4, -1)).transpose(1, 2).contiguous() for t in self.qkv(self.first(x)).chunk(3, -1))
        x = x + self.out(attention(*heads).transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(self.second(x))))  # type: ignore[no-any-return]


def opaque() -> nn.Module:
    return nn.Sequential(*(OpaqueBlock() for _ in range(4)))


class LogProbabilities(nn.Module):
    """What GRPO and DPO take: one number a token."""

    def __init__(self, width: int = 64, words: int = 1024) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(words, width), nn.RMSNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.lm_head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.down(F.silu(self.up(self.norm(x))))
        logits = self.lm_head(self.norm(x))[:, :-1] / 0.9
        found: Tensor = logits.gather(-1, tokens[:, 1:, None]).squeeze(-1) - logits.logsumexp(-1)
        return found


def preference(model: Callable[..., Any]) -> Tensor:
    found: Tensor = -model(tokens().repeat(1, 2)).mean()
    return found


OPAQUE = "an opaque attention kernel"
SETUPS: Mapping[str, SetUp] = {
    "Llama": SetUp(lambda: llama().bfloat16(), language_loss, 0.37),
    "Llama, checkpointed": SetUp(lambda: checkpointed(llama().bfloat16()), language_loss, 0.55),
    "Llama, checkpointed, autocast": SetUp(lambda: checkpointed(llama()), under_autocast, 0.55),
    "LayerNorm blocks, checkpointed": SetUp(lambda: Checkpointed().bfloat16(), squares(256, WIDTH), 0.52),
    "LoRA on q and v, checkpointed": SetUp(
        lambda: with_adapters(checkpointed(llama().bfloat16()), 0.0, ["q_proj", "v_proj"]), language_loss, 0.60
    ),
    "LoRA everywhere, dropout": SetUp(lambda: with_adapters(llama().bfloat16(), 0.05, EVERY), language_loss, 0.24),
    "BERT, dropout, autocast": SetUp(bert, under_autocast, 0.25),
    "GPT-2, dropout, autocast": SetUp(gpt2, under_autocast, 0.25),
    "Mixtral, autocast": SetUp(mixtral, under_autocast, 0.35),
    "Mixtral, BF16": SetUp(lambda: mixtral().bfloat16(), language_loss, 0.35),
    OPAQUE: SetUp(lambda: opaque().bfloat16(), squares(2, 128, WIDTH), 0.34),
    "log-probabilities": SetUp(LogProbabilities, preference, 0.30, {"memory.chunk_logits": 4}),
}


def gradients(setup: SetUp, model: nn.Module, compiled: Callable[..., Any] | None = None) -> dict[str, Tensor]:
    """Of one step, in float64; random numbers are the same in every call."""
    torch.manual_seed(1)
    setup.loss(model if compiled is None else compiled).backward()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def in_float64(setup: SetUp) -> nn.Module:
    """The model as a reference: grouped matmuls exist in 32 bits at most, so experts run one by one."""
    model = made(setup).double()
    if hasattr(getattr(model, "config", None), "num_local_experts"):
        model.set_experts_implementation("eager")  # type: ignore[operator]
    return model


def made(setup: SetUp) -> nn.Module:
    """The set-up's model, always with the same weights."""
    torch.manual_seed(0)
    return setup.make()


def least(found: Mapping[str, float]) -> float:
    return min((db for db in found.values() if math.isfinite(db)), default=math.inf)
