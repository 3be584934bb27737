"""What the plain models share: a model that knows its loss, and batches that a model can learn from."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness.batches import Batch, cross_entropy, next_bytes
from benchmarks.zoo.registry import RATE, ZooModel

WIDTH = 128
ROWS = 256  # of a table, or points, or rays


def plain(
    name: str,
    make: Callable[[], nn.Module],
    batch: Callable[[int], Batch],
    loss: Callable[[Any, Batch], Tensor],
    note: str = "",
    rate: float = RATE,
    **dynamo: Any,
) -> ZooModel:
    """A model of torch alone, compiled under these settings of Dynamo."""
    return ZooModel(name, "plain", make, batch, loss, rate, note, dynamo)


def wide(x: Tensor) -> Tensor:
    """In FP32 where it is narrower, for a loss."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def mean_squared(output: Any, batch: Batch) -> Tensor:
    """Of the output to the target."""
    assert batch.target is not None
    return F.mse_loss(wide(output), batch.target.to(wide(output).dtype))


def binary(output: Any, batch: Batch) -> Tensor:
    """Cross-entropy of logits to targets of 0 and 1."""
    assert batch.target is not None
    return F.binary_cross_entropy_with_logits(wide(output), batch.target.to(wide(output).dtype))


def given(output: Any, batch: Batch) -> Tensor:
    """The loss that the model itself returns."""
    loss: Tensor = output
    return loss


def next_tokens(output: Any, batch: Batch) -> Tensor:
    """Cross-entropy of each position to the token after it."""
    assert batch.target is not None
    return F.cross_entropy(wide(output).flatten(0, 1), batch.target.flatten())


def text(number: int, rows: int = 8, length: int = 32) -> Batch:
    """Bytes of Python's source, and the byte after each."""
    found = next_bytes(number, rows, length + 1).kwargs
    assert found is not None
    ids = found["input_ids"]
    return Batch((ids[:, :-1].contiguous(),), target=ids[:, 1:].contiguous())


def generator(number: int) -> torch.Generator:
    """Of a batch's random numbers."""
    return torch.Generator().manual_seed(number)


def fixed(*shape: int, seed: int = 5) -> Tensor:
    """The same random numbers in every batch: what there is to learn."""
    return torch.randn(*shape, generator=generator(seed))


def features(number: int, rows: int = ROWS, width: int = WIDTH) -> Batch:
    """Rows, and a smooth function of each as its target."""
    x = torch.randn(rows, width, generator=generator(number))
    return Batch((x,), target=torch.tanh(x @ fixed(width, 16) / width**0.5))


def classes(number: int, rows: int = ROWS, width: int = WIDTH, count: int = 10) -> Batch:
    """Rows around the centre of their class."""
    source = generator(number)
    target = torch.randint(count, (rows,), generator=source)
    return Batch((fixed(count, width)[target] + torch.randn(rows, width, generator=source),), target=target)


def mlp(*widths: int, act: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linears of these widths with an activation between them."""
    layers: list[nn.Module] = []
    for n, m in pairwise(widths):
        layers += [nn.Linear(n, m), act()]
    return nn.Sequential(*layers[:-1])


__all__ = ["cross_entropy"]
