"""Models that people train, as their libraries make them, without a download: a loss, and how its numbers are held."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Loss = Callable[[Callable[..., Any]], Tensor]


@dataclass(frozen=True)
class SetUp:
    """One of them.

    Attributes:
        model: on the device.
        loss: of the model, or of what it was compiled to.
        autocast: FP32 weights under BF16 autocast; else BF16 weights.
        repeatable: without dropout, so that gradients can be compared.
        shape: of its input.
    """

    model: nn.Module
    loss: Loss
    autocast: bool
    repeatable: bool
    shape: list[int]


def built(name: str, device: torch.device, tiny: bool, layers: int = 0) -> SetUp:
    """A set-up; fewer layers where asked for.

    Raises:
        ValueError: there is none of that name.
    """
    makers = {"resnet50": _resnet, "vit": _vit, "bert": _bert, "gpt2": _gpt2, "mixtral": _mixtral}
    torch.manual_seed(0)
    if name in ("llama", "ckpt", "lora"):
        return _llama(name, device, tiny, layers or 6)
    if name not in makers:
        raise ValueError(f"{name!r} is no set-up. Fix: one of {', '.join((*makers, 'llama', 'ckpt', 'lora'))}.")
    return makers[name](device, tiny, layers or 12)


def _resnet(device: torch.device, tiny: bool, layers: int) -> SetUp:
    import torchvision

    made = torchvision.models.resnet18(num_classes=10) if tiny else torchvision.models.resnet50()
    model = made.to(device).to(memory_format=torch.channels_last)
    shape = [2, 3, 64, 64] if tiny else [128, 3, 224, 224]
    x = torch.randn(shape, device=device).to(memory_format=torch.channels_last)
    y = torch.randint(10, (shape[0],), device=device)
    return SetUp(model, lambda call: F.cross_entropy(call(x), y), True, True, shape)


def _vit(device: torch.device, tiny: bool, layers: int) -> SetUp:
    from transformers import ViTConfig, ViTForImageClassification

    small = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128, "image_size": 64}
    config = ViTConfig(num_hidden_layers=2, **small) if tiny else ViTConfig(num_hidden_layers=layers)
    shape = [2 if tiny else 64, 3, config.image_size, config.image_size]
    x, y = torch.randn(shape, device=device), torch.randint(2, (shape[0],), device=device)
    model = ViTForImageClassification(config).to(device)
    return SetUp(model, lambda call: call(pixel_values=x, labels=y).loss, True, True, shape)


def _bert(device: torch.device, tiny: bool, layers: int) -> SetUp:
    from transformers import BertConfig, BertForMaskedLM

    small = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128, "vocab_size": 512}
    config = BertConfig(num_hidden_layers=2, **small) if tiny else BertConfig(num_hidden_layers=layers)
    return _of_tokens(BertForMaskedLM(config).to(device), [2, 64] if tiny else [32, 512], True, False)


def _gpt2(device: torch.device, tiny: bool, layers: int) -> SetUp:
    from transformers import GPT2Config, GPT2LMHeadModel

    small = {"n_embd": 64, "n_head": 2, "vocab_size": 512}
    config = GPT2Config(n_layer=2, **small) if tiny else GPT2Config(n_layer=layers)
    return _of_tokens(GPT2LMHeadModel(config).to(device), [2, 64] if tiny else [16, 1024], True, False)


def _llama(name: str, device: torch.device, tiny: bool, layers: int) -> SetUp:
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, ffn, heads, kv = (128, 256, 2, 2) if tiny else (2048, 8192, 32, 8)
    config = LlamaConfig(
        vocab_size=512 if tiny else 32000,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=2 if tiny else layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config).to(device).bfloat16()
    if name == "ckpt":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    if name == "lora":
        from peft import LoraConfig, get_peft_model

        wanted = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}
        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, **wanted)).train()
    return _of_tokens(model, [2, 64] if tiny else [4, 2048], False, name != "lora")


def _mixtral(device: torch.device, tiny: bool, layers: int) -> SetUp:
    from transformers import MixtralConfig, MixtralForCausalLM

    hidden, ffn, heads, kv = (64, 128, 2, 2) if tiny else (1024, 3584, 16, 4)
    config = MixtralConfig(
        vocab_size=512 if tiny else 32000,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=1 if tiny else min(layers, 4),
        num_attention_heads=heads,
        num_key_value_heads=kv,
        num_local_experts=4 if tiny else 8,
        use_cache=False,
    )
    model = MixtralForCausalLM(config).to(device).bfloat16()
    return _of_tokens(model, [2, 64] if tiny else [4, 2048], False, True)


def _of_tokens(model: nn.Module, shape: list[int], autocast: bool, repeatable: bool) -> SetUp:
    x = torch.randint(model.config.vocab_size, shape, device=next(model.parameters()).device)
    return SetUp(model, lambda call: call(input_ids=x, labels=x).loss, autocast, repeatable, shape)
