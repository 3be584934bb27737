"""Four small trainings to scale losses in.

    llama           the demo's, 2 layers, next byte                          AdamW
    bert            transformers' BertForMaskedLM, 15 % of the bytes masked   LAMB
    efficientnet    timm's efficientnet_b0 on scikit-learn's digits, 32 x 32  RMSprop
    vit             a pre-norm ViT of timm's on the digits                    AdamW

A CPU convolves FP16 some ten times slower than FP32 (efficientnet_b0: 5 s against 0.6 s for a step of 32 digits), so
convolutions of FP16 tensors are FP32 convolutions here, rounded once: what hardware does, which accumulates in FP32.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.workarounds import mend_torchvision
from fp8compile.optim import LAMB, AdamW, RMSprop
from fp8compile.train.data import Corpus, load_corpus, train_batches, validation_batches
from fp8compile.train.loop import CLIP_NORM
from fp8compile.train.model import BETAS, Size, build_model

MASK, IGNORED, CLASSES = 256, -100, 10
SIZE = Size("scaling", 128, 384, 2, 4, 128, 8, 200, 1e-3, 64)
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Training:
    """What one task trains.

    Attributes:
        about: in words.
        model: FP32, from a seed; (inputs) -> logits, classes last.
        optimizer: of a model, with the options that every arm shares.
        batches: (seed, steps) -> inputs and targets.
        held_out: the same for every arm and seed.
        rate: the peak.
        clip_norm: of the gradient.
    """

    about: str
    model: Callable[[int], nn.Module]
    optimizer: Callable[..., torch.optim.Optimizer]
    batches: Callable[[int, int], Any]
    held_out: Callable[[], list[Batch]]
    rate: float
    steps: int
    clip_norm: float = CLIP_NORM


# ------------------------------------------------------------------------------------------------------ bytes


@functools.cache
def corpus() -> Corpus:
    return load_corpus()


class NextByte(nn.Module):
    """The demo's Llama: the logits of every position but the last."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        mend_torchvision()
        self.llama = build_model(SIZE, seed, torch.device("cpu"))

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.llama(input_ids=ids).logits
        return logits[:, :-1]


def _next(ids: Tensor) -> Batch:
    return ids, ids[:, 1:].contiguous()


def _masked(ids: Tensor, generator: torch.Generator) -> Batch:
    hidden = torch.rand(ids.shape, generator=generator) < 0.15
    return ids.masked_fill(hidden, MASK), ids.masked_fill(~hidden, IGNORED)


def _byte_batches(seed: int, steps: int, masked: bool) -> Any:
    generator = torch.Generator().manual_seed(seed)
    for ids in train_batches(corpus().train, SIZE.batch, SIZE.length, seed, steps):
        yield _masked(ids, generator) if masked else _next(ids)


@functools.cache
def _held_out_bytes(masked: bool) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    windows = validation_batches(corpus().validation, SIZE.batch, SIZE.length, SIZE.validation_windows)
    return [_masked(ids, generator) if masked else _next(ids) for ids in windows]


def _bert(seed: int) -> nn.Module:
    mend_torchvision()
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=264,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=SIZE.length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model: nn.Module = BertForMaskedLM(config)
    return model


# ----------------------------------------------------------------------------------------------------- images


@functools.cache
def _digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's 1797 handwritten digits as FP32 [n, 3, 32, 32] in -1 ... 1, and their classes."""
    from sklearn.datasets import load_digits  # type: ignore

    found = load_digits()
    small = torch.from_numpy(found.images).float() / 8 - 1
    large = F.interpolate(small[:, None], size=(32, 32), mode="bilinear", align_corners=False)
    return large.expand(-1, 3, -1, -1).contiguous(), torch.from_numpy(found.target).long()


def _is_held_out() -> Tensor:
    return torch.arange(len(_digits()[1])) % 5 == 0


def _image_batches(seed: int, steps: int, rows: int) -> Any:
    images, classes = _digits()
    own = (~_is_held_out()).nonzero()[:, 0]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        chosen = own[torch.randint(len(own), (rows,), generator=generator)]
        yield images[chosen], classes[chosen]


@functools.cache
def _held_out_images() -> list[Batch]:
    images, classes = (each[_is_held_out()] for each in _digits())
    return list(zip(images.split(90), classes.split(90), strict=True))


@functools.cache
def fp16_convolutions_in_fp32() -> torch.library.Library:
    """Replace the CPU's convolutions of FP16 tensors in this process; see the head of this file."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    for name in ("convolution", "convolution_backward"):
        kernel = torch.library.get_kernel(f"aten::{name}", "CPU")  # type: ignore[attr-defined,unused-ignore]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel is replaced is the purpose
            library.impl(name, functools.partial(_convolve, kernel, keys), "CPU")  # type: ignore[no-untyped-call]
    return library


def _convolve(kernel: Any, keys: Any, *args: Any) -> Any:
    if args[0].dtype != torch.float16:
        return kernel.call_boxed(keys, *args)
    result = kernel.call_boxed(keys, *(a.float() if isinstance(a, Tensor) else a for a in args))
    if isinstance(result, Tensor):
        return result.half()
    return tuple(None if r is None else r.half() for r in result)


def _timm(seed: int, name: str, **options: Any) -> nn.Module:
    mend_torchvision()
    import timm  # type: ignore

    fp16_convolutions_in_fp32()
    torch.manual_seed(seed)
    model = timm.create_model(name, num_classes=CLASSES, drop_rate=0.0, drop_path_rate=0.0, **options)
    assert isinstance(model, nn.Module)
    return model


ADAM: dict[str, Any] = {"betas": BETAS, "weight_decay": 0.1}
RMS: dict[str, Any] = {"alpha": 0.9, "momentum": 0.9, "eps": 1e-3}
VIT: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 128, "depth": 4, "num_heads": 4}
TRAININGS: Mapping[str, Training] = {
    "llama": Training(
        "the demo's Llama, 2 layers x 128, 8 windows of 128 bytes, AdamW",
        NextByte,
        functools.partial(AdamW, **ADAM),
        functools.partial(_byte_batches, masked=False),
        functools.partial(_held_out_bytes, False),
        rate=1e-3,
        steps=200,
    ),
    "bert": Training(
        "BertForMaskedLM, 2 layers x 128, 8 windows of 128 bytes, LAMB",
        _bert,
        functools.partial(LAMB, weight_decay=0.01),
        functools.partial(_byte_batches, masked=True),
        functools.partial(_held_out_bytes, True),
        rate=1e-2,
        steps=150,
    ),
    "efficientnet": Training(
        "efficientnet_b0, 16 digits of 32 x 32, RMSprop",
        functools.partial(_timm, name="efficientnet_b0"),
        functools.partial(RMSprop, **RMS),
        functools.partial(_image_batches, rows=16),
        _held_out_images,
        rate=1e-3,
        steps=40,
    ),
    "vit": Training(
        "pre-norm ViT, 4 layers x 128, patch 8, 32 digits of 32 x 32, AdamW",
        functools.partial(_timm, name="vit_tiny_patch16_224", **VIT),
        functools.partial(AdamW, **ADAM),
        functools.partial(_image_batches, rows=32),
        _held_out_images,
        rate=1e-3,
        steps=150,
    ),
}
