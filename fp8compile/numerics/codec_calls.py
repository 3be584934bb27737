"""Calls of codecs, as a listener hears of them: which operations of a trace are one encode or decode, and of which groups."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from fp8compile.numerics.formats import Format

Listener = Callable[["CodecCall", Callable[[], Any]], Any]
Method = TypeVar("Method", bound=Callable[..., Any])
_listener: Listener | None = None


@dataclass(frozen=True, eq=False)
class CodecCall:
    """One call: equal to itself alone.

    Attributes:
        encodes: whether it encodes; else it decodes.
        dtype: of the values.
        groups: rows, the elements of a row, and of a group, which ends with its row.
    """

    encodes: bool
    format: Format
    scale_dtype: torch.dtype
    dtype: torch.dtype
    groups: tuple[int, int, int]

    @property
    def count(self) -> int:
        """How many groups there are."""
        rows, row, size = self.groups
        return rows * -(-row // size)


class Scaled(Protocol):
    @property
    def format(self) -> Format: ...

    @property
    def scale_dtype(self) -> torch.dtype: ...

    def sizes(self, shape: Sequence[Any]) -> Sequence[Any]:
        """Rows, the elements of a row, and of a group, of a tensor of ``shape``."""


def one_call(*, encodes: bool) -> Callable[[Method], Method]:
    """A codec's ``encode(x)`` or ``decode(codes, inv_scale, dtype)`` as one call that the listener hears of.

    Not where only a run knows its sizes, or an amax is given: then a part of it is not the codec's.
    """

    def heard(method: Method) -> Method:
        @functools.wraps(method)
        def inside(codec: Scaled, x: Tensor, *others: Any) -> Any:
            if _listener is None or (encodes and any(other is not None for other in others)):
                return method(codec, x, *others)
            sizes = codec.sizes(x.shape)
            if not all(isinstance(size, int) and size for size in sizes):
                return method(codec, x, *others)
            dtype, (rows, row, size) = x.dtype if encodes else others[-1], sizes
            call = CodecCall(encodes, codec.format, codec.scale_dtype, dtype, (rows, row, size))
            return _listener(call, lambda: method(codec, x, *others))

        return cast(Method, inside)

    return heard


def set_listener(listener: Listener | None) -> Listener | None:
    """Have ``listener`` given each call, which computes it and returns its result; returns the one before."""
    global _listener
    before, _listener = _listener, listener
    return before
