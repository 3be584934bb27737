"""Groups of an optimizer state: runs of G elements along the last dimension that share their metadata.

    x[..., n]  ->  groups [ceil(n / G)] per row, the last one short  ->  metadata [..., ceil(n / G)]

Where the last dimension is shorter than G (a convolution's 3 x 3) it is combined with those before it, but never with the
first: a shard along dim 0 must own whole groups, so that it can be cut, saved and loaded without decoding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor

GROUP = 128
SMALLEST = 2.0**-126  # FP32's smallest normal value: a second moment that is not zero is no smaller


class StateCodec(Protocol):
    """How one optimizer state is stored: a pure pair of functions, FP32 in and FP32 out."""

    @property
    def name(self) -> str:
        """What ``state_format`` calls it, e.g. ``e4m3_expanded``."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the tensors ``encode`` returns, ``codes`` first."""

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """The stored tensors of an FP32 state of any shape. A non-finite element makes its group NaN."""

    def decode(self, parts: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        """The FP32 state of ``shape`` that the stored tensors stand for."""


@dataclass(frozen=True)
class Grouped:
    """Base of the codecs whose codes have the state's shape: subclasses see ``[N, G]`` and nothing of shapes or tails.

    Attributes:
        signed: whether negative values occur; without them (second moments) no value above 0 ever decodes to 0.
        group_size: elements that share metadata; None: the whole tensor (for ablations; a shard would not own it).
        rounding: "nearest", or "dithered" where the state is never negative (``states.dither``).
    """

    signed: bool = True
    group_size: int | None = GROUP
    rounding: str = field(default="nearest", kw_only=True)

    parts: ClassVar[tuple[str, ...]] = ("codes", "amax")

    @property
    def dithers(self) -> bool:
        return self.rounding == "dithered"

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        codes_NG, *metadata_N1 = self.encode_groups(in_groups(x, self.group_size))
        shape = metadata_shape(x.shape, self.group_size)
        metadata = (each if each.shape == shape else each.reshape(shape) for each in metadata_N1)
        return out_of_groups(codes_NG, x.shape, self.group_size), *metadata

    def decode(self, parts: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        codes_NG = in_groups(parts[0], self.group_size)
        by_group = (*codes_NG.shape[:-1], 1)
        metadata = (each if each.shape == by_group else each.reshape(by_group) for each in parts[1:])
        x_NG = self.decode_groups(codes_NG, *metadata)
        return out_of_groups(x_NG, shape, self.group_size)

    def encode_groups(self, x_NG: Tensor) -> tuple[Tensor, ...]:
        """``[N, G]`` FP32, short groups filled with zeros -> codes ``[N, G]`` and metadata ``[N, 1]`` each."""
        raise NotImplementedError

    def decode_groups(self, codes_NG: Tensor, *metadata_N1: Tensor) -> Tensor:
        """The inverse of ``encode_groups``, FP32."""
        raise NotImplementedError


def encoded_zeros(codec: StateCodec, shape: Sequence[int], device: torch.device) -> tuple[Tensor, ...]:
    """``codec.encode`` of zeros of ``shape``, equal bit by bit, of which one group alone is computed: all have its codes."""
    like = codec.encode(torch.zeros(shape, dtype=torch.float32, device="meta"))
    group = codec.encode(
        torch.zeros((*[1] * (len(shape) - 1), GROUP)[: len(shape)], dtype=torch.float32, device=device)
    )
    return tuple(
        part.flatten()[:1].expand(wanted.numel()).clone().resize_(wanted.shape)
        for part, wanted in zip(group, like, strict=True)
    )


def rows_of(shape: Sequence[int], group_size: int | None) -> tuple[tuple[int, ...], int]:
    """The dimensions that count rows, and the elements of a row: the shortest trailing part as long as a group."""
    if group_size is None:
        return (), math.prod(shape)
    outer, length = list(shape), 1
    while len(outer) > (len(shape) > 1) and length < group_size:
        length *= outer.pop()
    return tuple(outer), length


def columns_within(columns: int, full: int, length: int) -> int:
    """How many of a part's columns belong to the first ``full`` elements of a row of ``length``, all of them full groups.

    A part has one column per element, per two or four elements, or per group.
    """
    return full * columns // length


def metadata_shape(shape: Sequence[int], group_size: int | None) -> tuple[int, ...]:
    """``(*shape[:-1], ceil(n / G))``, short trailing dimensions taken together; one number if there are no groups."""
    outer, length = rows_of(shape, group_size)
    return (*outer, -(-length // group_size) if group_size else min(1, length))


def in_groups(x: Tensor, group_size: int | None) -> Tensor:
    """``x`` in contiguous order as ``[N, G]`` (or ``[..., G]``); short groups, at the end of a row, are filled with zeros."""
    _, length = rows_of(x.shape, group_size)
    size = max(1, min(length, group_size or length))
    if x.dim() > 1 and x.shape[-1] == size:
        return x  # each row is a group; x may be a view that reshape would have to copy
    if length % size == 0:
        return x.reshape(x.numel() // size, size)
    x_RL = x.reshape(x.numel() // length, length)
    raw = x_RL.view(torch.uint8) if x.element_size() == 1 else x_RL  # FP8 cannot be padded
    return torch.nn.functional.pad(raw, (0, -length % size)).view(x.dtype).reshape(-1, size)


def out_of_groups(x_NG: Tensor, shape: Sequence[int], group_size: int | None) -> Tensor:
    """The inverse of ``in_groups`` for a tensor of ``shape``."""
    numel = math.prod(shape)
    if x_NG.numel() == numel:
        return x_NG if x_NG.shape == torch.Size(shape) else x_NG.reshape(shape)
    _, length = rows_of(shape, group_size)
    return x_NG.reshape(numel // length, -1)[:, :length].reshape(shape)


def unit_and_amax(x_NG: Tensor) -> tuple[Tensor, Tensor]:
    """``|x| / amax`` in [0, 1] ``[N, G]`` (0 in an all-zero group), and amax ``[N, 1]``, NaN if it is not finite."""
    a = x_NG.abs()
    amax = a.amax(-1, keepdim=True)
    return a / torch.where(amax > 0, amax, 1.0), torch.where(amax < torch.inf, amax, torch.nan)


def zeros_or(codes_NG: Tensor, amax_N1: Tensor, a_NG: Tensor) -> Tensor:
    """``a``, but at least 2**-126, and 0 where the code is 0; where amax is NaN nothing is 0."""
    return torch.where((codes_NG == 0) & (amax_N1 < torch.inf), 0.0, a_NG.clamp_min(SMALLEST))
