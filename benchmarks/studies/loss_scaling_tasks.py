"""Four small trainings to scale losses in.

    llama           the demo's, 2 layers, next byte                          AdamW
    bert            BertForTokenClassification: a byte of source's token      LAMB
    efficientnet    timm's efficientnet_b0 on scikit-learn's digits, 32 x 32  RMSprop
    vit             a pre-norm ViT of timm's on the digits                    AdamW

BERT learns what kind of Python token each byte belongs to (a keyword's, a string's, ...; Pygments' lexer says). Masked bytes
are no task at this size: after 2,000 steps of LAMB two layers still predict byte frequencies (3.12 nats), in FP32 too.

Products and convolutions of FP16 tensors are computed in FP32 and rounded once (``reproduce.fp16_on_cpu``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from pygments.token import Comment, Keyword, Name, Number, Operator, Punctuation, String
from torch import Tensor, nn

from benchmarks.harness.workarounds import mend_torchvision
from fp8compile.extras.demo.data import Corpus, load_corpus, train_batches, validation_batches
from fp8compile.extras.demo.loop import CLIP_NORM
from fp8compile.extras.demo.model import BETAS, Size, build_model
from fp8compile.optim import LAMB, AdamW, RMSprop

CLASSES = 10
KINDS = (String.Doc, String, Comment, Keyword, Name, Number, Operator, Punctuation)  # the first that holds; or none
LABELLED = 1 << 20  # bytes of each half that are given to the lexer
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


@functools.cache
def _labelled(held_out: bool) -> Tensor:
    """The first bytes of a half of the corpus, each plus 256 times its token's kind."""
    from pygments.lexers import PythonLexer

    text = (corpus().validation if held_out else corpus().train)[:LABELLED]
    found = text.long()
    for start, token, word in PythonLexer(stripnl=False, ensurenl=False).get_tokens_unprocessed(
        bytes(text.tolist()).decode("latin-1")
    ):
        kind = next((i for i, name in enumerate(KINDS) if name in token), len(KINDS))
        found[start : start + len(word)] += 256 * kind
    return found


def _byte_and_kind(labelled: Tensor) -> Batch:
    return labelled % 256, labelled // 256


def _byte_batches(seed: int, steps: int) -> Any:
    return map(_next, train_batches(corpus().train, SIZE.batch, SIZE.length, seed, steps))


def _token_batches(seed: int, steps: int) -> Any:
    return map(_byte_and_kind, train_batches(_labelled(False), SIZE.batch, SIZE.length, seed, steps))


@functools.cache
def _held_out_bytes() -> list[Batch]:
    return [_next(ids) for ids in _validation(corpus().validation)]


@functools.cache
def _held_out_tokens() -> list[Batch]:
    return [_byte_and_kind(ids) for ids in _validation(_labelled(True))]


def _validation(text: Tensor) -> list[Tensor]:
    return validation_batches(text, SIZE.batch, SIZE.length, SIZE.validation_windows)


def _bert(seed: int) -> nn.Module:
    mend_torchvision()
    from transformers import BertConfig, BertForTokenClassification

    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=256,
        num_labels=len(KINDS) + 1,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=SIZE.length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model: nn.Module = BertForTokenClassification(config)
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


def _timm(seed: int, name: str, **options: Any) -> nn.Module:
    mend_torchvision()
    import timm  # type: ignore

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
        _byte_batches,
        _held_out_bytes,
        rate=1e-3,
        steps=200,
    ),
    "bert": Training(
        "BERT, kinds of tokens, 2 layers x 128, 8 windows of 128 bytes, LAMB",
        _bert,
        functools.partial(LAMB, weight_decay=0.01),
        _token_batches,
        _held_out_tokens,
        rate=1e-2,
        steps=300,
    ),
    "efficientnet": Training(
        "efficientnet_b0, 16 digits of 32 x 32, RMSprop",
        functools.partial(_timm, name="efficientnet_b0"),
        functools.partial(RMSprop, **RMS),
        functools.partial(_image_batches, rows=16),
        _held_out_images,
        rate=1e-3,
        steps=200,
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
