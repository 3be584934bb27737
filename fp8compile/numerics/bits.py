"""Masks as bits, exactly: eight of a tensor's elements, in their order in memory, to a byte.

element 8 i + k is bit k of byte i;  the last byte is filled up with zeros
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BYTE = 8


@dataclass(frozen=True)
class Bits:
    """A codec of truth values. It has no scale, and rounds nothing."""

    @property
    def name(self) -> str:
        return "bits"

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes that a mask of ``shape`` takes."""
        return -(-math.prod(shape) // BYTE)

    def encode(self, mask: Tensor) -> tuple[Tensor]:
        """``mask``, bool, of n elements -> uint8 ``[ceil(n / 8)]``."""
        flat = mask.reshape(-1).to(torch.uint8)
        if missing := -flat.numel() % BYTE:
            flat = torch.nn.functional.pad(flat, (0, missing))
        of_eight = flat.reshape(-1, BYTE)
        packed = of_eight[:, 0]
        for k in range(1, BYTE):
            packed = packed | (of_eight[:, k] << k)
        return (packed,)

    def decode(self, codes: Tensor, shape: Sequence[int]) -> Tensor:
        """The mask of ``shape``, bool."""
        places = torch.arange(BYTE, dtype=torch.uint8, device=codes.device)
        bits = ((codes[:, None] >> places) & 1).reshape(-1)
        return bits[: math.prod(shape)].reshape(shape) != 0
