"""Whole numbers that are proven to be small, exactly: indices as int64 take eight bytes each, where one or two hold them.

    codes = x.to(narrow);  x = codes.to(wide)

``narrow`` is the smallest integer that holds all of [least, largest], which is proven of x, so that nothing is rounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NARROW = (torch.uint8, torch.int8, torch.int16, torch.int32)


@dataclass(frozen=True)
class WholeNumbers:
    """A codec of integers. It has no scale, and rounds nothing.

    Attributes:
        narrow: what the codes are.
        wide: what is decoded.
    """

    narrow: torch.dtype
    wide: torch.dtype

    @property
    def name(self) -> str:
        return f"{str(self.narrow).removeprefix('torch.')}, which holds all of them"

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes that a tensor of ``shape`` takes."""
        return math.prod(shape) * self.narrow.itemsize

    def encode(self, x: Tensor) -> tuple[Tensor]:
        """``x``, of ``wide`` -> codes of its shape, of ``narrow``."""
        return (x.to(self.narrow),)

    def decode(self, codes: Tensor) -> Tensor:
        """The numbers, of ``wide``."""
        return codes.to(self.wide)


def narrowest(least: float, largest: float, wide: torch.dtype) -> WholeNumbers | None:
    """The codec of fewest bytes for whole numbers in [least, largest]; None where ``wide`` has no more bytes than it."""
    for narrow in NARROW:
        info = torch.iinfo(narrow)
        if info.min <= least and largest <= info.max and narrow.itemsize < wide.itemsize:
            return WholeNumbers(narrow, wide)
    return None
