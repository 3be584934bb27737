"""Masks as bits, exactly: sixteen of a tensor's elements, in their order in memory, to a word of 16 bits.

    element 16 i + k is bit k of word i;  the last word is filled up with zeros

A word is a sum over sixteen neighbours, which Inductor computes in the kernel that makes the mask: it unrolls sums over eight
and less, into a kernel of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WORD = 16


@dataclass(frozen=True)
class Bits:
    """A codec of truth values. It has no scale, and rounds nothing."""

    @property
    def name(self) -> str:
        return "bits"

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes that a mask of ``shape`` takes."""
        return -(-math.prod(shape) // WORD) * torch.int16.itemsize

    def encode(self, mask: Tensor) -> tuple[Tensor]:
        """``mask``, bool, of n elements -> int16 ``[ceil(n / 16)]``."""
        flat = mask.reshape(-1).to(torch.int32)
        if missing := -flat.numel() % WORD:
            flat = torch.nn.functional.pad(flat, (0, missing))
        return ((flat.reshape(-1, WORD) << _places(mask)).sum(1, dtype=torch.int32).to(torch.int16),)

    def decode(self, codes: Tensor, shape: Sequence[int]) -> Tensor:
        """The mask of ``shape``, bool."""
        bits = ((codes.to(torch.int32).unsqueeze(1) >> _places(codes)) & 1).reshape(-1)
        return bits.narrow(0, 0, math.prod(shape)).reshape(shape) != 0


def _places(beside: Tensor) -> Tensor:
    return torch.arange(WORD, dtype=torch.int32, device=beside.device)
