"""The most that the buffers of a generated wrapper take at one time: its text says where each is made, reused and dropped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import torch

_MADE = re.compile(r"(\w+) = empty_strided_cuda\(\(([^)]*)\), \(([^)]*)\), torch\.(\w+)\)")
_RESULT = re.compile(r"(\w+) = \w+\[\d+\]")  # one of several of a library's operation
_REUSED = re.compile(r"(\w+) = .*; del (\w+)  # reuse")
_DROPPED = re.compile(r"del (\w+)")


def peak_bytes(wrapper: str, sizes: Mapping[str, int] | None = None, given: Iterable[str] = ()) -> int:
    """Bytes of the buffers that a wrapper allocates, at the moment that most of them exist.

    Args:
        wrapper: the text.
        sizes: bytes of what a library's operation allocates, by name: see ``sizes_now``. Not counted without.
        given: names of inputs that count from the start until the wrapper drops them; their bytes are in ``sizes``.
    """
    sizes = sizes or {}
    alive = {name: sizes[name] for name in given}
    most = sum(alive.values())
    for line in map(str.strip, wrapper.splitlines()):
        if made := _MADE.match(line):
            alive[made[1]] = _bytes(_numbers(made[2]), _numbers(made[3]), getattr(torch, made[4]))
        elif (result := _RESULT.fullmatch(line)) and result[1] in sizes:
            alive[result[1]] = sizes[result[1]]
        elif (reused := _REUSED.match(line)) and reused[2] in alive:
            alive[reused[1]] = alive.pop(reused[2])
        elif dropped := _DROPPED.fullmatch(line):
            alive.pop(dropped[1], None)
        most = max(most, sum(alive.values()))
    return most


def sizes_now() -> dict[str, int]:
    """Bytes of each input and buffer of the graph that Inductor generates code for at the moment."""
    from torch._inductor.virtualized import V

    graph = V.graph
    named = {**graph.graph_inputs, **graph.name_to_buffer}
    return {name: size for name, value in named.items() if (size := _laid_out(value)) is not None}


def _laid_out(value: object) -> int | None:
    """Bytes of an input or a buffer; None for one without memory of its own: a tuple of results, a change of another."""
    layout = getattr(value, "get_layout", None) and value.maybe_get_layout()  # type: ignore[attr-defined]
    size, stride = getattr(layout, "size", None), getattr(layout, "stride", None)
    if size is None or stride is None or len(size) != len(stride):  # a change of a view has the view's size alone
        return None
    return _bytes([int(n) for n in size], [int(n) for n in stride], layout.dtype)


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n.strip()]


def _bytes(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> int:
    last = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    return (last + 1) * dtype.itemsize
