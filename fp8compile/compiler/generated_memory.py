"""The most memory that generated code has alive at one time: its text says where buffers are made and dropped.

Changes no numbers. Inductor decides late which buffers exist: kernels are fused, results are written over what they read. Its
wrapper is a list of calls with a line for each buffer that is made, taken over or dropped. Read line by line, it gives what
an allocator is asked for, except for what a library takes while it computes.

The sizes of a library's results are not in the text. They are Inductor's own, taken while it decides on fusion.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph

from fp8compile import _torch as private
from fp8compile.compiler.report_store import write_whole
from fp8compile.compiler.row_kernels import fusing_only_where
from fp8compile.reporting.running import GeneratedPeaks

_MADE = re.compile(r"(\w+) = empty_strided_(?:cuda|cpu|xpu)\(\(([^)]*)\), \(([^)]*)\), torch\.(\w+)\)")
_RESULT = re.compile(r"(\w+) = (?:\w+\[\d+\]|torch\.ops\..*|extern_kernels\..*)")  # of a library's operation
_REUSED = re.compile(r"(\w+) = .*; del (\w+)  # reuse")
_DROPPED = re.compile(r"del (\w+)")
_PARTS = re.compile(r"^\s*def (?:partition|\w*subgraph)", re.MULTILINE)
CALLERS, FROM_OUTSIDE = "primals", "tangents"  # how AOTAutograd names what the caller owns, and given gradients


def noting_peaks(
    inner_compile: Callable[..., Any], found: GeneratedPeaks, graph_key: str, file: Callable[[str], Path]
) -> Callable[..., Any]:
    """An inner compiler of Inductor that puts the peak of each half into ``found``.

    ``file(key)`` is where peaks are kept for warm starts: both halves' under the graph's key, and each under its text's,
    since Inductor's own cache serves any graph that lowers to the same code.
    """

    @functools.wraps(inner_compile)
    def compiled(gm: Any, *args: Any, **kwargs: Any) -> Any:
        graphs: list[Any] = []

        def noted(scheduler: Any, first: Any, second: Any) -> bool:
            if not graphs:
                graphs.append(private.inductor_virtualized.graph)
            return True

        with fusing_only_where(noted):
            code = inner_compile(gm, *args, **kwargs)
        text = getattr(code, "source_code", "")
        if not kwargs.get("is_inference") and _is_one_list_of_calls(text):
            is_backward = bool(kwargs.get("is_backward"))
            half = "backward" if is_backward else "forward"
            text_file = functools.partial(file, hashlib.sha256(f"{half}\n{text}".encode()).hexdigest())
            given = _given(gm.graph) if is_backward else ()
            if known := _peak_of(half, text, graphs, given):
                _write(text_file, known)
            if known := known or stored_peaks(text_file).halves:
                found.halves |= known
                _write(functools.partial(file, graph_key), found.halves)
        return code

    return compiled


def _peak_of(half: str, text: str, graphs: Sequence[Any], given: Sequence[str]) -> dict[str, int]:
    """The peak of a half that was lowered just now; nothing of one that came from a cache, or that only a run knows."""
    with contextlib.suppress(ValueError):  # a size that is no number
        if graphs:
            sizes = sizes_of(graphs[0])
            kept = sum(sizes.get(name, 0) for name in given if not name.startswith(FROM_OUTSIDE))
            return {half: peak_bytes(text, sizes, given)} | ({"kept": kept} if half == "backward" else {})
    return {}


def _is_one_list_of_calls(wrapper: str) -> bool:
    """Whether a wrapper is Python, of one function, whose buffers are each allocated by a line of its own."""
    config = private.inductor_config
    return bool(wrapper) and not (config.cpp_wrapper or config.memory_planning or _PARTS.search(wrapper))


def stored_peaks(file: Callable[[], Path]) -> GeneratedPeaks:
    """What was written for code that is now in a cache; nothing where that is gone."""
    try:
        halves = json.loads(file().read_text())
        return GeneratedPeaks({half: int(size) for half, size in halves.items()})
    except (OSError, ValueError, AttributeError, TypeError):
        return GeneratedPeaks()


def _write(file: Callable[[], Path], halves: Mapping[str, int]) -> None:
    with contextlib.suppress(OSError):  # without it, a warm start has the estimate
        write_whole(file(), dict(halves))


def _given(graph: Graph) -> list[str]:
    """A backward's inputs that were saved for it, and the gradients that it starts from."""
    return [n.name for n in graph.find_nodes(op="placeholder") if not n.name.startswith(CALLERS)]


def peak_bytes(wrapper: str, sizes: Mapping[str, int] | None = None, given: Iterable[str] = ()) -> int:
    """Bytes of the buffers that a wrapper allocates, at the moment that most of them exist.

    Args:
        wrapper: the text.
        sizes: bytes of what a library's operation allocates, by name: see ``sizes_of``. Not counted without.
        given: names of inputs that count from the start until the wrapper drops them; their bytes are in ``sizes``.
    """
    sizes = sizes or {}
    alive = {name: sizes[name] for name in given if name in sizes}
    most = sum(alive.values())
    for line in map(str.strip, wrapper.splitlines()):
        if made := _MADE.match(line):
            alive[made[1]] = _bytes(_numbers(made[2]), _numbers(made[3]), getattr(torch, made[4]))
        elif (reused := _REUSED.match(line)) and reused[2] in alive:
            alive[reused[1]] = alive.pop(reused[2])
        elif (result := _RESULT.match(line)) and result[1] in sizes:
            alive[result[1]] = sizes[result[1]]
        elif dropped := _DROPPED.fullmatch(line):
            alive.pop(dropped[1], None)
        most = max(most, sum(alive.values()))
    return most


def sizes_of(graph: Any) -> dict[str, int]:
    """Bytes of each input and buffer of a graph that Inductor lowered, by name."""
    named = {**graph.graph_inputs, **graph.name_to_buffer}
    return {name: size for name, value in named.items() if (size := _laid_out(value)) is not None}


def _laid_out(value: object) -> int | None:
    """Bytes of an input or a buffer; None for one without memory of its own: a tuple of results, a change of another."""
    layout: Any = getattr(value, "get_layout", None) and value.maybe_get_layout()  # type: ignore[attr-defined]
    size, stride = getattr(layout, "size", None), getattr(layout, "stride", None)
    if size is None or stride is None or len(size) != len(stride):  # a change of a view has the view's size alone
        return None
    if not all(isinstance(n, int) or getattr(n, "is_number", False) for n in (*size, *stride)):
        raise ValueError("a size that only a run knows")
    return _bytes([int(n) for n in size], [int(n) for n in stride], layout.dtype)


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n.strip()]


def _bytes(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> int:
    last = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    return (last + 1) * dtype.itemsize
