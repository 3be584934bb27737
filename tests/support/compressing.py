"""Optimizers by twos: torch.optim's own, and one that is compressed, over equal parameters that get equal gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import fp8compile
from tests.support.optim_bounds import U

SHAPES = ((64, 128), (33, 130), (10,))  # rows of one group; rows that end in a short one; one that is kept whole
ROUNDINGS = 12  # of an update, one after the other


def parameters(shapes: Iterable[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """The same ones at each call."""
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter((torch.randn(shape, generator=generator) / 2).to(dtype)) for shape in shapes]


def shapes_for(name: str) -> tuple[tuple[int, ...], ...]:
    """Muon takes matrices alone."""
    return SHAPES[:2] if name == "Muon" else SHAPES


def of_torch(name: str, **options: Any) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    several = parameters(shapes_for(name))
    return several, getattr(torch.optim, name)(several, **options)


def compressed(
    name: str, state_format: Any = "e4m3_expanded", *, compiled: bool = False, **options: Any
) -> tuple[list[nn.Parameter], Any]:
    several, optimizer = of_torch(name, **options)
    return several, fp8compile.optim.compress(optimizer, state_format, compiled=compiled)


def with_gradients(step: int, *several: Sequence[nn.Parameter]) -> None:
    """Random gradients, the same for each list."""
    generator = torch.Generator().manual_seed(step + 1)
    for alike in zip(*several, strict=True):
        grad = torch.randn(alike[0].shape, generator=generator)
        for p in alike:
            p.grad = grad.to(p.dtype)


def values(several: Sequence[Tensor]) -> list[Tensor]:
    return [p.detach().clone() for p in several]


def assert_same_way(ours: Sequence[Tensor], theirs: Sequence[Tensor], before: Sequence[Tensor], steps: int) -> None:
    """Both have gone the same way from ``before``, but for the roundings of FP32, in the lengths of whole tensors.

    An update   is rounded a dozen times by each of the two, by U of it at most
    a parameter is rounded by each at every step, by U of it at most. These roundings know nothing of each other, so those of
                a tensor have 1 / sqrt(3) U for their root mean square, and those of n steps and two sides
                sqrt(2 n / 3) U: twice that is more than a tensor of ten elements comes to by chance
    """
    for p, q, old in zip(ours, theirs, before, strict=True):
        way, length, off = (float(x.detach().float().norm()) for x in (q - old, q, p - q))
        bound = U * (2 * ROUNDINGS * way + 2 * math.sqrt(2 * steps / 3) * length)
        assert off <= bound, f"{[*p.shape]}: {off / bound:.2f} of what roundings come to"


def off_the_way(ours: Sequence[Tensor], theirs: Sequence[Tensor], before: Sequence[Tensor]) -> float:
    """By how much a way differs, of its length; the largest of all tensors."""
    each = zip(ours, theirs, before, strict=True)
    return max(float(((p - q).norm() / (q - old).norm()).detach()) for p, q, old in each)


def formats(optimizer: Any, state: str) -> list[str]:
    """In which formats the parameters, in their order, keep this state; by the keys of their states."""
    each = (optimizer.state[p] for group in optimizer.param_groups for p in group["params"])
    return [next(key.split(".")[1] for key in found if key.split(".")[0] == state) for found in each]
