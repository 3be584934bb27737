"""Bytes saved for backward, measured from outside: the distinct storages autograd then holds.

What a compiled graph saves reaches autograd in two ways: through ``save_for_backward``, where
``saved_tensors_hooks`` sees it, and (torch >= 2.11) as tensors kept on the node without a version check.
No hook sees these, so they are read from the nodes here. Parameters, buffers and the batch are left out: they
are there with or without a backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

UNHOOKED_ATTRIBUTE = "_tensors_no_vc_check"


def saved_bytes(forward: Callable[[], Tensor], not_counted: Iterable[Tensor]) -> int:
    """Bytes that the result of ``forward()`` keeps alive for its backward.

    Args:
        forward: runs one forward and returns the loss; no backward follows.
        not_counted: parameters, buffers and inputs.
    """
    owned = {_key(tensor) for tensor in not_counted}
    sizes: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        sizes[_key(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        loss = forward()
    for node in _nodes(loss):
        for tensor in getattr(node, UNHOOKED_ATTRIBUTE, ()):
            count(tensor)
    return sum(nbytes for key, nbytes in sizes.items() if key not in owned)


def saved_bytes_of_step(step_model: Callable[..., Any], model: torch.nn.Module, tokens: Tensor) -> int:
    """``saved_bytes`` of one batch through ``step_model``, whose parameters are ``model``'s."""

    def forward() -> Tensor:
        loss: Tensor = step_model(input_ids=tokens, labels=tokens).loss
        return loss

    return saved_bytes(forward, [*model.parameters(), *model.buffers(), tokens])


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _nodes(loss: Tensor) -> Iterator[Any]:
    seen: set[Any] = set()
    todo: list[Any] = [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        todo.extend(following for following, _ in node.next_functions)
