"""Tiny models of transformers: a config from sizes, dropout off, a task with batches of real bytes, digits or tones."""

from __future__ import annotations

import functools
from collections.abc import Callable
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
from benchmarks.zoo.registry import ZooModel

WIDTH, LAYERS, HEADS, FFN = 128, 2, 4, 256
ROWS, LENGTH = 4, 64  # of text: 256 tokens
IMAGE, PATCH, IMAGES = 32, 8, 8
CAUSAL = functools.partial(next_bytes, rows=ROWS, length=LENGTH)
MASKED = functools.partial(masked_bytes, rows=ROWS, length=LENGTH)
CONTINUED = functools.partial(continued_bytes, rows=ROWS, length=LENGTH)
DIGITS = functools.partial(digits, rows=IMAGES, size=IMAGE)
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 2 * LENGTH,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "use_cache": False,
}
GROUPED: dict[str, Any] = {**SIZES, "num_key_value_heads": HEADS // 2}
SIGHT: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "image_size": IMAGE,
    "patch_size": PATCH,
    "num_labels": CLASSES,
}


def hugging_face(
    name: str,
    config: str,
    model: str,
    batch: Callable[[int], Batch],
    loss: Callable[[Any, Batch], Tensor] = own_loss,
    note: str = "",
    **sizes: Any,
) -> ZooModel:
    """A model of transformers by the names of its config and its class; imported when it is built."""

    def make() -> nn.Module:
        import transformers

        found = without_randomness(getattr(transformers, config)(**sizes))
        made = getattr(transformers, model)(found)
        assert isinstance(made, nn.Module)
        return made

    return ZooModel(name, "transformers", make, batch, loss, note=note)


def without_randomness(config: Any) -> Any:
    """The config, and those in it, with each of its dropout rates 0."""
    for key, value in vars(config).items():
        if key.endswith("_config") and hasattr(value, "to_dict"):
            without_randomness(value)
        elif isinstance(value, float) and ("drop" in key or key in ("mask_time_prob", "mask_feature_prob")):
            setattr(config, key, 0.0)
    return config


def causal(name: str, prefix: str, **sizes: Any) -> ZooModel:
    """A language model on the bytes of Python's source."""
    return hugging_face(name, f"{prefix}Config", f"{prefix}ForCausalLM", CAUSAL, **sizes)


def masked(name: str, prefix: str, **sizes: Any) -> ZooModel:
    """An encoder on masked bytes."""
    return hugging_face(name, f"{prefix}Config", f"{prefix}ForMaskedLM", MASKED, **sizes)


def sighted(name: str, prefix: str, **sizes: Any) -> ZooModel:
    """A classifier of digits."""
    return hugging_face(name, f"{prefix}Config", f"{prefix}ForImageClassification", DIGITS, cross_entropy, **sizes)


def tones(number: int, rows: int, samples: int) -> Batch:
    """Waves whose pitch is their class, with noise."""
    generator = torch.Generator().manual_seed(number)
    classes = torch.randint(CLASSES, (rows,), generator=generator)
    time = torch.arange(samples) / 16_000
    pitch = 100.0 * (1 + classes[:, None])
    waves = torch.sin(2 * torch.pi * pitch * time) + 0.1 * torch.randn(rows, samples, generator=generator)
    return Batch((waves,), target=classes)
