"""The state codecs as two operators, so that a traced graph holds each use of them whole.

    fp8compile::encode_state(x, format, signed) -> parts        fp8compile::decode_state(parts, shape, format, signed) -> x

An optimizer written for FP32 states writes a state several times in one step (v *= b2, then v += ...) and reads it in
between. With operators, a pass sees that decode(encode(x)) within a step stands for x, and replaces the remaining operators
by the codec's own arithmetic (passes/fuse_state_codecs.py). Where no pass runs, the operators compute what they stand for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fp8compile.numerics.states.interface import StateCodec, columns_within, rows_of
from fp8compile.numerics.states.registry import state_codec


@torch.library.custom_op("fp8compile::encode_state", mutates_args=())
def encode_state(x: Tensor, format: str, signed: bool) -> list[Tensor]:
    """The parts of an FP32 state; ``format`` is one of STATE_FORMATS that is not "fp32"."""
    return [part.contiguous() for part in state_codec(format, signed=signed).encode(x)]


@torch.library.custom_op("fp8compile::decode_state", mutates_args=())
def decode_state(parts: Sequence[Tensor], shape: Sequence[int], format: str, signed: bool) -> Tensor:
    """The FP32 state of ``shape`` that the parts stand for."""
    return state_codec(format, signed=signed).decode(parts, shape).contiguous()


@encode_state.register_fake
def _(x: Tensor, format: str, signed: bool) -> list[Tensor]:
    return [part.contiguous() for part in state_codec(format, signed=signed).encode(x)]


@decode_state.register_fake
def _(parts: Sequence[Tensor], shape: Sequence[int], format: str, signed: bool) -> Tensor:
    return parts[0].new_empty(shape, dtype=torch.float32)


def encoded_in_pieces(codec: StateCodec, x: Tensor) -> tuple[Tensor, ...]:
    """``codec.encode(x)``. Rows that end in a short group make two pieces, full groups and tails, each a loop of its own.

    Where one loop goes over such rows and finds metadata by ``i // 128``, Inductor's C++ backend splits it at 128 and
    drops the tail (torch 2.13, github.com/pytorch/pytorch/issues/195582).
    """
    outer, length, full = _tails(codec, x.shape)
    if full == length:
        return codec.encode(x)
    x_RL = x.reshape(math.prod(outer), length)
    pieces = zip(codec.encode(x_RL[:, :full]), codec.encode(x_RL[:, full:]), strict=True)
    parts_RC = (torch.cat(two, 1) for two in pieces)
    return tuple(t.reshape(x.shape if t.numel() == x.numel() else (*outer, t.shape[1])) for t in parts_RC)


def decoded_in_pieces(codec: StateCodec, parts: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """``codec.decode(parts, shape)``, in pieces as above."""
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
