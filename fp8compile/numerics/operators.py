"""Functions as operators ``torch.ops.fp8compile.*``: a graph holds each whole, and a device may have a form of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("fp8compile", "FRAGMENT")  # type: ignore[no-untyped-call]


def operator(
    schema: str, fn: Callable[..., Any], *, pointwise: bool = True, result: Callable[..., Any] | None = None
) -> Any:
    """``fn`` as an operator.

    Args:
        schema: its name, arguments and results, as torch writes them.
        fn: what it computes, on any device.
        pointwise: whether each element of the result depends on one element of each operand.
        result: the result's shape and dtype where nothing is computed, if that is cheaper to have than by ``fn``.
    """
    name = schema.partition("(")[0]
    tags = (torch.Tag.pointwise,) if pointwise else ()
    _LIBRARY.define(schema, tags=tags)  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, fn, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    if result is not None:
        _LIBRARY.impl(name, result, "Meta")  # type: ignore[no-untyped-call]
    return getattr(torch.ops.fp8compile, name).default
