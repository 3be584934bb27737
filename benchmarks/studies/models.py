"""The models of the sweep: small but real, without dropout, on real bytes and real digits.

Each factory takes a seed and returns a ``Case``: the model in FP32 and training mode, batches by number
(``harness/batches.py``), the loss.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.batches import (
    CLASSES,
    VOCABULARY,
    Batch,
    continued_bytes,
    cross_entropy,
    digits,
    masked_bytes,
    next_bytes,
    own_loss,
)
from benchmarks.harness.workarounds import mend_torchvision


@dataclass(frozen=True)
class Case:
    """One model of the sweep.

    Attributes:
        about: its configuration in words.
        model: FP32, training mode, no dropout.
        batch: the batch of that number; the same for every call.
        loss: of the model's output for a batch.
    """

    about: str
    model: nn.Module
    batch: Callable[[int], Batch]
    loss: Callable[[Any, Batch], Tensor]


def bert(seed: int, tiny: bool = False) -> Case:
    return bert_of(seed, *((64, 1, 4, 32) if tiny else (192, 3, 8, 128)))


def bert_of(seed: int, width: int, layers: int, rows: int, length: int, head: int = 32) -> Case:
    """A BERT of that size, its heads ``head`` wide, on masked bytes."""
    mend_torchvision()
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // head,
        intermediate_size=4 * width,
        max_position_embeddings=length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    about = f"BertForMaskedLM, {layers} layers, hidden {width}, {rows} x {length} bytes, some padded"
    batch = functools.partial(masked_bytes, rows=rows, length=length)
    return _case(seed, about, lambda: BertForMaskedLM(config), batch, own_loss)


def t5(seed: int, tiny: bool = False) -> Case:
    mend_torchvision()
    from transformers import T5Config, T5ForConditionalGeneration

    width, layers, rows, length = (64, 1, 4, 32) if tiny else (128, 2, 8, 64)
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=width,
        d_kv=32,
        d_ff=4 * width,
        num_layers=layers,
        num_heads=width // 32,
        dropout_rate=0.0,
        pad_token_id=0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    about = f"T5ForConditionalGeneration, {layers} + {layers} layers, {width} wide, {rows} x 2 x {length} bytes"
    batch = functools.partial(continued_bytes, rows=rows, length=length)
    return _case(seed, about, lambda: T5ForConditionalGeneration(config), batch, own_loss)


def gpt2(seed: int, tiny: bool = False) -> Case:
    mend_torchvision()
    from transformers import GPT2Config, GPT2LMHeadModel

    width, layers, rows, length = (64, 1, 4, 32) if tiny else (192, 3, 8, 128)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=width,
        n_layer=layers,
        n_head=width // 32,
        n_positions=length,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    about = f"GPT2LMHeadModel, {layers} layers, hidden {width}, {rows} x {length} bytes"
    batch = functools.partial(next_bytes, rows=rows, length=length)
    return _case(seed, about, lambda: GPT2LMHeadModel(config), batch, own_loss)


def llama(seed: int, tiny: bool = False, ffn: int | None = None) -> Case:
    return llama_of(seed, *((64, 1, 4, 32) if tiny else (192, 3, 8, 128)), ffn)


def llama_of(seed: int, width: int, layers: int, rows: int, length: int, ffn: int | None = None) -> Case:
    """A Llama of that size, its heads 32 wide, on bytes."""
    mend_torchvision()
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=ffn or 8 * width // 3,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64,
        max_position_embeddings=length,
        attention_dropout=0.0,
        use_cache=False,
    )
    about = f"LlamaForCausalLM, {layers} layers, hidden {width}, grouped queries, {rows} x {length} bytes"
    batch = functools.partial(next_bytes, rows=rows, length=length)
    return _case(seed, about, lambda: LlamaForCausalLM(config), batch, own_loss)


def qwen3(seed: int, tiny: bool = False) -> Case:
    mend_torchvision()
    from transformers import Qwen3Config, Qwen3ForCausalLM

    width, layers, rows, length = (64, 1, 4, 32) if tiny else (192, 3, 8, 128)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64,
        head_dim=48,
        max_position_embeddings=length,
        attention_dropout=0.0,
        use_cache=False,
    )
    about = f"Qwen3ForCausalLM, {layers} layers, hidden {width}, heads of 48 normalised, {rows} x {length} bytes"
    batch = functools.partial(next_bytes, rows=rows, length=length)
    return _case(seed, about, lambda: Qwen3ForCausalLM(config), batch, own_loss)


def vit(seed: int, tiny: bool = False) -> Case:
    mend_torchvision()
    from transformers import ViTConfig, ViTForImageClassification

    width, layers, rows, size, patch = (64, 1, 8, 32, 8) if tiny else (192, 3, 8, 64, 8)
    config = ViTConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        intermediate_size=4 * width,
        image_size=size,
        patch_size=patch,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=CLASSES,
    )
    about = f"ViTForImageClassification, {layers} layers, hidden {width}, {rows} x {size} x {size}, patch {patch}"
    batch = functools.partial(digits, rows=rows, size=size)
    return _case(seed, about, lambda: ViTForImageClassification(config), batch, cross_entropy)


def _timm(name: str, seed: int, rows: int, size: int, **options: Any) -> Case:
    mend_torchvision()
    import timm  # type: ignore

    def make() -> nn.Module:
        model = timm.create_model(name, num_classes=CLASSES, drop_rate=0.0, drop_path_rate=0.0, **options)
        assert isinstance(model, nn.Module)
        return model

    about = f"timm {name}, {rows} x {size} x {size}"
    return _case(seed, about, make, functools.partial(digits, rows=rows, size=size), cross_entropy)


def resnet18(seed: int) -> Case:
    return _timm("resnet18", seed, rows=16, size=64)


def efficientnet_b0(seed: int) -> Case:
    return _timm("efficientnet_b0", seed, rows=8, size=64)


def convnext(seed: int) -> Case:
    return _timm("convnext_atto", seed, rows=8, size=64)


def vit_tiny(seed: int) -> Case:
    return _timm("vit_tiny_patch16_224", seed, rows=8, size=96, img_size=96)


def _case(
    seed: int,
    about: str,
    make: Callable[[], nn.Module],
    batch: Callable[[int], Batch],
    loss: Callable[[Any, Batch], Tensor],
) -> Case:
    torch.manual_seed(seed)
    return Case(about, make().train(), batch, loss)


TRANSFORMERS: Mapping[str, Callable[..., Case]] = {
    "bert": bert,
    "t5": t5,
    "vit": vit,
    "gpt2": gpt2,
    "llama": llama,
    "qwen3": qwen3,
}
TIMM: Mapping[str, Callable[..., Case]] = {
    "resnet18": resnet18,
    "efficientnet_b0": efficientnet_b0,
    "convnext": convnext,
    "vit_tiny": vit_tiny,
}
MODELS: Mapping[str, Callable[..., Case]] = {**TRANSFORMERS, **TIMM}
