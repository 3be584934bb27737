"""States of a channels_last parameter: groups follow its memory, so that an update reads parameter, gradient and codes alike.

    x [N, C, H, W] in memory [N, H, W, C]   ->   codes [N, H, W, C], metadata [N, ..., groups]: of the codec, contiguous

A state's key says so: ``exp_avg.e4m3_expanded@channels_last.codes``. Its groups are others than those of a contiguous one, so
what is loaded from one into the other is encoded again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8compile.numerics.states.interface import StateCodec

MARK = "@channels_last"


def is_channels_last(t: Tensor) -> bool:
    """Whether a tensor's channels, dimension 1 of four or five, lie side by side in memory, and it is not contiguous too."""
    return t.dim() in (4, 5) and not t.is_contiguous() and in_memory_order(t).is_contiguous()


def in_memory_order(t: Tensor) -> Tensor:
    """``[N, C, ...]`` viewed as ``[N, ..., C]``."""
    return t.movedim(1, -1)


def by_channels(t: Tensor) -> Tensor:
    """The inverse of ``in_memory_order``."""
    return t.movedim(-1, 1)


def laid_by_channels(t: Tensor) -> Tensor:
    """A tensor ``[N, C, ...]`` in channels_last memory, copied where it is not."""
    return by_channels(in_memory_order(t).contiguous())


@dataclass(frozen=True)
class ChannelsLast:
    """A codec whose parts are those of ``[N, ..., C]``."""

    codec: StateCodec

    @property
    def name(self) -> str:
        return self.codec.name + MARK

    @property
    def parts(self) -> tuple[str, ...]:
        return self.codec.parts

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.codec.encode(in_memory_order(x).contiguous())

    def decode(self, parts: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        n, c, *others = shape
        return by_channels(self.codec.decode(parts, torch.Size((n, *others, c))))
