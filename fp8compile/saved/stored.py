"""How one saved value is stored: its codec, and what is known of the value that the codec does not know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from fp8compile.fx.graph import numel, sizes_in_memory
from fp8compile.numerics import Codec, Groupwise
from fp8compile.numerics.bits import Bits
from fp8compile.numerics.centring import decode_about_centre, encode_about_centre
from fp8compile.numerics.few_bits import FewBits
from fp8compile.numerics.unit_sums import with_unit_sums
from fp8compile.numerics.whole_numbers import WholeNumbers
from fp8compile.saved.about import About
from fp8compile.saved.attention_result import Tokens
from fp8compile.saved.sides import Sides, keep_sides

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
        about: the statistics that it is encoded about, where it is normalised; they are kept beside it.
        sides: the edges that the backward compares it with, whose side its codes keep; in INT8 groups.
    """

    codec: Codec | FewBits | Bits | WholeNumbers
    why: str = ""
    softmax_dim: int | None = None
    tokens: Tokens | None = None
    about: About | None = None
    sides: Sides | None = None

    @property
    def is_exact(self) -> bool:
        """Whether what is decoded is what was encoded, bit for bit."""
        return isinstance(self.codec, (Bits, WholeNumbers))

    @property
    def beside(self) -> tuple[Node, ...]:
        """What ``encode`` needs besides: nodes of the forward, those of ``about`` first."""
        return (*(self.about.beside if self.about else ()), *(self.sides.operands if self.sides else ()))

    @property
    def name(self) -> str:
        """What the report calls it, e.g. ``e4m3 1x128 (made by exp: spans decades)``."""
        centred = self.about.name if self.about else CENTRED if self.tokens is not None else ""
        known = (self.why, "" if self.softmax_dim is None else SUMS, centred)
        remarks = "; ".join(filter(None, known))
        return f"{self.codec.name} ({remarks})" if remarks else self.codec.name

    @property
    def parts(self) -> tuple[str, ...]:
        """What is kept, in this order."""
        if self.is_exact:
            return ("codes",)
        if isinstance(self.codec, FewBits):
            return ("codes", "inv_scale", "zero_point")
        return ("codes", "inv_scale") if self.tokens is None else ("codes", "inv_scale", "centre")

    def nbytes(self, value: Tensor) -> int:
        """Bytes of all parts."""
        assert isinstance(self.codec, (Groupwise, FewBits, Bits, WholeNumbers))
        centre = 0 if self.tokens is None else CENTRE_BYTES * (numel(value) // self.tokens.length)
        return self.codec.nbytes(sizes_in_memory(value)) + centre

    def encode(self, x: Tensor, order: Order, *beside: Tensor) -> tuple[Tensor, ...]:
        """``x`` as ``parts``; ``order`` is the permutation that makes x contiguous, None where it is."""
        count = len(self.about.beside) if self.about else 0
        about, compared_with = beside[:count], beside[count:]
        z = self._in_order(x if self.about is None else self.about.deviation(x, about), order)
        if self.tokens is not None:
            assert isinstance(self.codec, Groupwise)
            parts: tuple[Tensor, ...] = encode_about_centre(z, self.tokens, self.codec)
        else:
            parts = self.codec.encode(z)
        if self.sides is None:
            return _as_rows(parts[0], order), *parts[1:]
        back = self.decode(parts, order, x.shape, x.dtype if self.about is None else torch.float32, *about)
        crossed = self.sides.crossed(x, back, compared_with)
        above, across = (self._in_order(each, order) for each in (x > back, crossed))
        return keep_sides(*(_as_rows(each, order) for each in (parts[0], above, across))), *parts[1:]

    @staticmethod
    def _in_order(x: Tensor, order: Order) -> Tensor:
        return x if order is None else x.permute(order)

    def decode(
        self, parts: Sequence[Tensor], order: Order, shape: Sequence[int], dtype: torch.dtype, *about: Tensor
    ) -> Tensor:
        """The value of ``dtype`` in its own ``shape``, computed in FP32 where more is done than decoding."""
        as_float = dtype if self.softmax_dim is None and self.about is None else torch.float32
        stored_as = shape if order is None else [shape[d] for d in order]
        if isinstance(self.codec, Bits):
            found = self.codec.decode(parts[0], stored_as)
        elif isinstance(self.codec, WholeNumbers):
            found = self.codec.decode(_from_rows(parts[0], shape, order))
        elif isinstance(self.codec, FewBits):
            codes, inv_scale, zero_point = parts
            found = self.codec.decode(codes, inv_scale, zero_point, stored_as, as_float)
        elif self.tokens is not None:
            assert isinstance(self.codec, Groupwise)
            codes, inv_scale, centre = _from_rows(parts[0], shape, order), *parts[1:]
            found = decode_about_centre(codes, inv_scale, centre, self.tokens, self.codec, dtype)
        else:
            codes, inv_scale = _from_rows(parts[0], shape, order), parts[1]
            found = self.codec.decode(codes, inv_scale, as_float)
        if order is not None:
            found = found.permute(tuple(order.index(d) for d in range(len(order))))
        if self.about is not None:
            return self.about.value(found, about).to(dtype)
        return found if self.softmax_dim is None else with_unit_sums(found, self.softmax_dim).to(dtype)


def _as_rows(codes: Tensor, order: Order) -> Tensor:
    """Codes of a permuted value of four dimensions, channels last as a rule, as a matrix ``[rows, channels]``.

    They lie in the order of the value's memory: (N, H, W, C). Inductor's layout optimization takes four dimensions beside a
    convolution for (N, C, H, W), and would lay them out channels last once more: H fastest, neighbours bytes apart. It
    leaves symbolic sizes alone, which the matrix would lose.
    """
    static = all(isinstance(size, int) for size in codes.shape)
    return codes.reshape(-1, codes.shape[-1]) if order is not None and codes.dim() == 4 and static else codes


def _from_rows(codes: Tensor, shape: Sequence[int], order: Order) -> Tensor:
    """Codes in the value's dimensions, as its memory has them."""
    return codes if order is None or codes.dim() == len(order) else codes.reshape([shape[d] for d in order])
