"""How one saved value is stored: its codec, and what is known of the value that the codec does not know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8compile.encoding.attention_result import Tokens
from fp8compile.fx.graph import numel, sizes_in_memory
from fp8compile.numerics import Codec, Groupwise, GroupwiseBest
from fp8compile.numerics.centring import decode_about_centre, encode_about_centre
from fp8compile.numerics.few_bits import FewBits
from fp8compile.numerics.unit_sums import with_unit_sums

Order = tuple[int, ...] | None
CENTRE_BYTES = 2  # BF16, one for each channel of a sequence
SUMS, CENTRED = "its sum made 1 again", "from the mean of tokens"


@dataclass(frozen=True)
class Stored:
    """A saved value's storage.

    Attributes:
        codec: of its elements in the order of its memory.
        why: the reason for the codec's format, where it depends on the value.
        softmax_dim: the dimension along which the value is a softmax's result; None where it is none.
        tokens: where its tokens lie, if it is encoded about their mean, in INT8 groups.
    """

    codec: Codec | FewBits
    why: str = ""
    softmax_dim: int | None = None
    tokens: Tokens | None = None

    @property
    def name(self) -> str:
        """What the report calls it, e.g. ``e4m3 1x128 (made by exp: spans decades)``."""
        known = (self.why, "" if self.softmax_dim is None else SUMS, "" if self.tokens is None else CENTRED)
        remarks = "; ".join(filter(None, known))
        return f"{self.codec.name} ({remarks})" if remarks else self.codec.name

    @property
    def parts(self) -> tuple[str, ...]:
        """What is kept, in this order."""
        if isinstance(self.codec, FewBits):
            return ("codes", "step", "least")
        return ("codes", "inv_scale") if self.tokens is None else ("codes", "inv_scale", "centre")

    def nbytes(self, value: Tensor) -> int:
        """Bytes of all parts."""
        assert isinstance(self.codec, (Groupwise, GroupwiseBest, FewBits))
        centre = 0 if self.tokens is None else CENTRE_BYTES * (numel(value) // self.tokens.length)
        return self.codec.nbytes(sizes_in_memory(value)) + centre

    def encode(self, x: Tensor, order: Order) -> tuple[Tensor, ...]:
        """``x`` as ``parts``; ``order`` is the permutation that makes x contiguous, None where it is."""
        x = x if order is None else x.permute(order)
        if self.tokens is None:
            return self.codec.encode(x)
        assert isinstance(self.codec, Groupwise)
        return encode_about_centre(x, self.tokens, self.codec)

    def decode(self, parts: Sequence[Tensor], order: Order, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The value of ``dtype`` in its own ``shape``, computed in FP32 where more is done than decoding."""
        if isinstance(self.codec, FewBits):
            codes, step, least = parts
            stored_as = shape if order is None else [shape[d] for d in order]
            found = self.codec.decode(codes, step, least, stored_as, dtype)
        elif self.tokens is not None:
            assert isinstance(self.codec, Groupwise)
            codes, inv_scale, centre = parts
            found = decode_about_centre(codes, inv_scale, centre, self.tokens, self.codec, dtype)
        else:
            codes, inv_scale = parts
            found = self.codec.decode(codes, inv_scale, dtype if self.softmax_dim is None else torch.float32)
        if order is not None:
            found = found.permute(tuple(order.index(d) for d in range(len(order))))
        return found if self.softmax_dim is None else with_unit_sums(found, self.softmax_dim).to(dtype)
