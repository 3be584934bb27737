"""The losses that ``LossScaler.scale`` is given: one tensor, or iterables of them, on any devices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8compile.numerics.histogram import beyond


def materialised(outputs: Any) -> Any:
    """Iterables other than lists and tuples as lists, so that they can be iterated twice.

    Raises:
        ValueError: neither a tensor nor an iterable; a tensor that is not real floating-point.
    """
    if isinstance(outputs, Tensor):
        if not outputs.is_floating_point():
            raise ValueError(
                f"scale() got a loss of {outputs.dtype}: it must be real and floating-point, as loss.float()"
            )
        return outputs
    if not isinstance(outputs, Iterable):
        raise ValueError(f"scale() takes a tensor or an iterable of tensors, not {type(outputs).__name__}")
    made = [materialised(each) for each in outputs]
    return tuple(made) if isinstance(outputs, tuple) else made


def flat(outputs: Any) -> list[Tensor]:
    """All tensors of what ``materialised`` returns."""
    return [outputs] if isinstance(outputs, Tensor) else [loss for each in outputs for loss in flat(each)]


def scaled(outputs: Any, scale: Tensor) -> Any:
    """Each tensor times the scale, as torch.amp.GradScaler does it."""
    if isinstance(outputs, Tensor):
        return outputs * scale.to(outputs.device, non_blocking=True)
    return type(outputs)(scaled(each, scale) for each in outputs)


def are_bad(losses: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Whether each loss is inf or NaN before it is scaled: 0-d bool."""
    values = [loss.detach() for loss in losses]
    return [beyond(x, torch.finfo(x.dtype).max).any().to(device, non_blocking=True) for x in values]


def given_scale(new_scale: float | Tensor, like: Tensor) -> Tensor:
    """A scale given by the user, as a tensor like ``like``. Raises ValueError unless it is a positive finite number."""
    if isinstance(new_scale, Tensor):
        if new_scale.numel() != 1 or new_scale.requires_grad:
            raise ValueError("new_scale must be a number, or a tensor of one element that requires no gradient")
        return new_scale.detach().reshape(()).to(like)
    if not 0 < new_scale < float("inf"):
        raise ValueError(f"new_scale={new_scale}: a positive finite number is needed")
    return torch.full_like(like, new_scale)
