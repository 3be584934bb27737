"""A codec on rows that end in a short group, in two pieces, full groups and tails, each a loop of its own.

Where one loop goes over such rows and finds metadata by ``i // 128``, Inductor's C++ backend splits it at 128 and drops the
tail (torch 2.13, github.com/pytorch/pytorch/issues/195582).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fp8compile.numerics.states.interface import StateCodec, columns_within, rows_of


def encoded_in_pieces(codec: StateCodec, x: Tensor) -> tuple[Tensor, ...]:
    """``codec.encode(x)``, in pieces."""
    outer, length, full = _tails(codec, x.shape)
    if full == length:
        return codec.encode(x)
    x_RL = x.reshape(math.prod(outer), length)
    pieces = zip(codec.encode(x_RL[:, :full]), codec.encode(x_RL[:, full:]), strict=True)
    parts_RC = (torch.cat(two, 1) for two in pieces)
    return tuple(t.reshape(x.shape if t.numel() == x.numel() else (*outer, t.shape[1])) for t in parts_RC)


def decoded_in_pieces(codec: StateCodec, parts: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """``codec.decode(parts, shape)``, in pieces."""
    outer, length, full = _tails(codec, shape)
    if full == length:
        return codec.decode(parts, shape)
    rows = math.prod(outer)
    parts_RC = [part.reshape(rows, -1) for part in parts]
    cuts = [columns_within(t.shape[1], full, length) for t in parts_RC]
    groups = codec.decode([t[:, :n] for t, n in zip(parts_RC, cuts, strict=True)], (rows, full))
    tails = codec.decode([t[:, n:] for t, n in zip(parts_RC, cuts, strict=True)], (rows, length - full))
    return torch.cat([groups, tails], 1).reshape(shape)


def _tails(codec: StateCodec, shape: Sequence[int]) -> tuple[tuple[int, ...], int, int]:
    """Rows, their length, and how much of the length is full groups: all of it where rows have no full groups or no tail."""
    size = getattr(codec, "group_size", None)
    outer, length = rows_of(shape, size)
    full = length // size * size if size and 0 not in shape else 0
    return outer, length, full or length
