"""Where the tokens of fused attention's result lie in the memory of a saved value."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from torch import Tensor
from torch.fx import Node

from fp8compile import _torch as private
from fp8compile.fx.graph import storage_root
from fp8compile.fx.ops import is_attention, is_view, opname

FEWEST = 32  # of these, a centre takes at most 1/16 of a byte for each element


class Tokens(NamedTuple):
    """A dense tensor's memory as ``[N, length, channels]``: what lies at i belongs to token ``i // channels % length``."""

    length: int
    channels: int


def tokens_of(made: Node) -> Tokens | None:
    """The tokens of attention's result in the memory of ``made``, which is that result or a view of all of it.

    None for what is none, for fewer than ``FEWEST`` tokens, for sizes that only a run knows, and for sequences that are
    packed into one dimension.
    """
    root = storage_root(made)
    if root.target is not private.getitem or root.args[1] != 0 or not _is_forward(root.args[0]):
        return None
    result, value = root.meta["val"], made.meta["val"]
    if result.dim() != 4 or not (_is_dense(result) and _is_dense(value)) or value.numel() != result.numel():
        return None
    length, channels = result.shape[2], result.stride(2)
    return Tokens(length, channels) if length >= FEWEST else None


def is_read_by_attention(value: Node) -> bool:
    """Whether the backward of fused attention reads a value, through views."""
    return any(is_attention(user) or (is_view(user) and is_read_by_attention(user)) for user in value.users)


def _is_forward(node: object) -> bool:
    return isinstance(node, Node) and opname(node).startswith("_scaled_dot_product") and is_attention(node)


def _is_dense(value: Tensor) -> bool:
    """Whether a tensor's elements fill a stretch of memory from its start, each once, and its sizes are known."""
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    if not all(isinstance(size, int) for size in sizes) or value.storage_offset():
        return False
    moving = sorted((stride, size) for stride, size in zip(value.stride(), value.shape, strict=True) if size != 1)
    steps = [stride for stride, _ in moving]
    return steps == [1, *itertools.accumulate((size for _, size in moving), int.__mul__)][: len(steps)]
