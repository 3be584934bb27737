"""How one saved value is stored: its codec, and what is known of the value that the codec does not know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8compile.numerics import Codec
from fp8compile.numerics.unit_sums import with_unit_sums

Order = tuple[int, ...] | None
PARTS = ("codes", "inv_scale")  # what is kept, in this order
SUMS = "its sum made 1 again"


@dataclass(frozen=True)
class Stored:
    """A saved value's storage.

    Attributes:
        codec: of its elements in the order of its memory.
        why: the reason for the codec's format, where it depends on the value.
        softmax_dim: the dimension along which the value is a softmax's result; None where it is none.
    """

    codec: Codec
    why: str = ""
    softmax_dim: int | None = None

    @property
    def name(self) -> str:
        """What the report calls it, e.g. ``e4m3 1x128 (made by exp: spans decades)``."""
        remarks = "; ".join(filter(None, (self.why, "" if self.softmax_dim is None else SUMS)))
        return f"{self.codec.name} ({remarks})" if remarks else self.codec.name

    def encode(self, x: Tensor, order: Order) -> tuple[Tensor, ...]:
        """``x -> PARTS``; ``order`` is the permutation that makes x contiguous, None where it is."""
        return self.codec.encode(x if order is None else x.permute(order))

    def decode(self, parts: Sequence[Tensor], order: Order, dtype: torch.dtype) -> Tensor:
        """The value of ``dtype`` in its own shape, computed in FP32 where its sums are made 1."""
        codes, inv_scale = parts
        found = self.codec.decode(codes, inv_scale, dtype if self.softmax_dim is None else torch.float32)
        if order is not None:
            found = found.permute(tuple(order.index(d) for d in range(len(order))))
        return found if self.softmax_dim is None else with_unit_sums(found, self.softmax_dim).to(dtype)
