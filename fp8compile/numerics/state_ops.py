"""The state codecs as two operators, so that a traced graph holds each use of them whole.

    fp8compile::encode_state(x, format, signed) -> parts        fp8compile::decode_state(parts, shape, format, signed) -> x

An optimizer written for FP32 states writes a state several times in one step (v *= b2, then v += ...) and reads it in
between. With operators a pass sees that decode(encode(x)) within a step stands for x, and puts the codec's own arithmetic
where the others are (passes/fuse_state_codecs.py). Where no pass runs, they compute what they stand for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8compile.numerics.state_codecs import state_codec


@torch.library.custom_op("fp8compile::encode_state", mutates_args=())
def encode_state(x: Tensor, format: str, signed: bool) -> list[Tensor]:
    """The parts of an FP32 state; ``format`` is one of STATE_FORMATS that is not "fp32"."""
    return list(state_codec(format, signed=signed).encode(x))


@torch.library.custom_op("fp8compile::decode_state", mutates_args=())
def decode_state(parts: Sequence[Tensor], shape: Sequence[int], format: str, signed: bool) -> Tensor:
    """The FP32 state of ``shape`` that the parts stand for."""
    return state_codec(format, signed=signed).decode(parts, shape)


@encode_state.register_fake
def _(x: Tensor, format: str, signed: bool) -> list[Tensor]:
    return list(state_codec(format, signed=signed).encode(x))


@decode_state.register_fake
def _(parts: Sequence[Tensor], shape: Sequence[int], format: str, signed: bool) -> Tensor:
    return parts[0].new_empty(shape, dtype=torch.float32)
