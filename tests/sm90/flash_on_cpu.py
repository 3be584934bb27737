"""CUDA's flash attention for CPU tensors, so that what was generated around it can be interpreted.

Same signature and layout of results as on a GPU (on_cuda.py maps to it); the numbers are those of the CPU's own flash
attention, which the graph was captured with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
_REGISTERED: list[Any] = []  # a library lives as long as the object


def install() -> None:
    """Register both directions for CPU tensors, for good."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_flash_attention", forward, "CPU")
    library.impl("_scaled_dot_product_flash_attention_backward", backward, "CPU")
    _REGISTERED.append(library)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, scale=scale
    )
    state = (torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64))
    laid_out = _by_position(out)
    return laid_out, logsumexp.contiguous(), None, None, query.shape[2], key.shape[2], *state, query.new_empty(0)


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, scale=scale
    )
    return tuple(_like(grad, x) for grad, x in zip(grads, (query, key, value), strict=True))


def _by_position(x: Tensor) -> Tensor:
    """``[batch, heads, seq, size]`` laid out as ``[batch, seq, heads, size]``, as the GPU's kernel does."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _like(grad: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x).copy_(grad)
