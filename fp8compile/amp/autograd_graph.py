"""What lies behind a loss: the nodes of its autograd graph, and whether FP16 gradients will flow through it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from fp8compile._torch import gradients_into


def nodes_behind(losses: Iterable[Tensor]) -> Iterator[Any]:
    """Every autograd node that the backward of these losses runs, once."""
    waiting = [loss.grad_fn for loss in losses]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node is not None:
            yield node
            new = {parent for parent, _ in node.next_functions} - seen
            seen |= new
            waiting += new


def leaves_behind(losses: Iterable[Tensor]) -> set[int]:
    """``id`` of every leaf (parameters, slots of compiled graphs) to which the backward of these losses gives a gradient."""
    return {id(node.variable) for node in nodes_behind(losses) if hasattr(node, "variable")}


def has_fp16(losses: Iterable[Tensor]) -> bool:
    """Whether some gradient in the backward of these losses is FP16, or a compiled graph in it has saved an FP16 tensor."""
    return any(_is_fp16(node) for node in nodes_behind(losses))


def _is_fp16(node: Any) -> bool:
    tensors = [*gradients_into(node), getattr(node, "variable", None), *(getattr(node, "saved_tensors", None) or ())]
    return any(getattr(each, "dtype", None) == torch.float16 for each in tensors)
