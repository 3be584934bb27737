"""Calls of codecs, as a listener hears of them: which operations of a trace are one encode or decode, and of which groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fp8compile.numerics.formats import Format

Listener = Callable[["CodecCall", Callable[[], Any]], Any]
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


def as_one_call(
    codec: Scaled,
    dtype: torch.dtype,
    groups: Sequence[int | torch.SymInt],
    compute: Callable[[], Any],
    *,
    encodes: bool,
) -> Any:
    """What ``compute`` returns, which the listener hears is one call of ``codec``, unless only a run knows its sizes.

    Args:
        dtype: of the values.
        groups: rows, the elements of a row, and of a group.
    """
    if _listener is None or not all(isinstance(size, int) and size for size in groups):
        return compute()
    rows, row, size = groups
    return _listener(CodecCall(encodes, codec.format, codec.scale_dtype, dtype, (rows, row, size)), compute)  # type: ignore[arg-type]


def set_listener(listener: Listener | None) -> Listener | None:
    """Have ``listener`` given each call, which computes it and returns its result; returns the one before."""
    global _listener
    before, _listener = _listener, listener
    return before
