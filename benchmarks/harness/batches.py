"""Batches of the studies' models, real bytes and real digits, and their losses; ``environment`` says whose digits.

Text models get the bytes of Python's own source; image models scikit-learn's handwritten digits, enlarged, or, where
scikit-learn is missing, random patterns that depend on the class (``digits_source()`` says which).
"""

from __future__ import annotations

import functools
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BYTES, MASK, VOCABULARY = 256, 256, 264  # token ids: the 256 bytes, [MASK], and room to spare
CLASSES = 10
IGNORED = -100  # the label that the losses of transformers skip


@dataclass(frozen=True)
class Batch:
    """What the model is called with, and what its output is compared with."""

    args: tuple[Tensor, ...] = ()
    kwargs: Mapping[str, Tensor] | None = None
    target: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """Everything in it."""
        target = [] if self.target is None else [self.target]
        return [*self.args, *(self.kwargs or {}).values(), *target]

    def to(self, dtype: torch.dtype) -> Batch:
        """The batch with its floating-point tensors in ``dtype``."""

        def cast(t: Tensor) -> Tensor:
            return t.to(dtype) if t.is_floating_point() else t

        kwargs = {k: cast(v) for k, v in (self.kwargs or {}).items()}
        return Batch(tuple(cast(t) for t in self.args), kwargs, self.target)


# ------------------------------------------------------------------------------------------------------ text


@functools.cache
def text() -> Tensor:
    """The bytes of the modules at the top of Python's standard library, one after the other, up to 2 MB."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    whole = b"".join(path.read_bytes() for path in sorted(stdlib.glob("*.py")))
    return torch.frombuffer(bytearray(whole[:2_000_000]), dtype=torch.uint8).long()


def _windows(number: int, rows: int, length: int) -> tuple[Tensor, torch.Generator]:
    generator = torch.Generator().manual_seed(number)
    starts = torch.randint(len(text()) - length, (rows,), generator=generator)
    return torch.stack([text()[s : s + length] for s in starts]), generator


def masked_bytes(number: int, rows: int, length: int) -> Batch:
    """BERT's task: 15 % of the bytes hidden; a quarter of the rows padded, as in a real batch."""
    ids, generator = _windows(number, rows, length)
    hidden = torch.rand(ids.shape, generator=generator) < 0.15
    attended = torch.ones_like(ids)
    attended[::4, length * 3 // 4 :] = 0
    labels = ids.masked_fill(~hidden | (attended == 0), IGNORED)
    ids = ids.masked_fill(hidden, MASK)
    return Batch(kwargs={"input_ids": ids, "attention_mask": attended, "labels": labels})


def next_bytes(number: int, rows: int, length: int) -> Batch:
    """A language model's task; transformers shifts the labels itself."""
    ids, _ = _windows(number, rows, length)
    return Batch(kwargs={"input_ids": ids, "labels": ids.clone()})


def continued_bytes(number: int, rows: int, length: int) -> Batch:
    """T5's task: the second half of a window from the first; a quarter of the rows padded."""
    ids, _ = _windows(number, rows, 2 * length)
    source, target = ids[:, :length].contiguous(), ids[:, length:].contiguous()
    attended = torch.ones_like(source)
    attended[::4, length * 3 // 4 :] = 0
    return Batch(kwargs={"input_ids": source, "attention_mask": attended, "labels": target})


def own_loss(output: Any, batch: Batch) -> Tensor:
    """The loss that a model of transformers computes when it is given labels: inside the compiled graph."""
    loss: Tensor = output.loss
    return loss


# ---------------------------------------------------------------------------------------------------- images


DIGITS = "scikit-learn's digits"


@functools.cache
def _digits() -> tuple[Tensor, Tensor, str]:
    try:
        from sklearn.datasets import load_digits  # type: ignore
    except ImportError:
        generator = torch.Generator().manual_seed(0)
        classes = torch.arange(1797) % CLASSES
        patterns = torch.randn(CLASSES, 8, 8, generator=generator)[classes]
        images = patterns + 0.5 * torch.randn(patterns.shape, generator=generator)
        return images, classes, "class-dependent patterns"
    found = load_digits()
    images = torch.from_numpy(found.images).float() / 8 - 1
    return images, torch.from_numpy(found.target).long(), DIGITS


def digits_source() -> str:
    """Where the images come from."""
    return _digits()[2]


def digits(number: int, rows: int, size: int) -> Batch:
    """Handwritten digits, enlarged from 8 x 8, in three channels; model(images) and labels beside it."""
    images, classes, _ = _digits()
    generator = torch.Generator().manual_seed(number)
    chosen = torch.randint(len(images), (rows,), generator=generator)
    large = F.interpolate(images[chosen, None], size=(size, size), mode="bilinear", align_corners=False)
    return Batch((large.expand(-1, 3, -1, -1).contiguous(),), target=classes[chosen])


def cross_entropy(output: Any, batch: Batch) -> Tensor:
    """The loss of a classifier, outside the compiled graph, as in timm's and torchvision's scripts."""
    logits = getattr(output, "logits", output)
    assert batch.target is not None
    return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), batch.target)
