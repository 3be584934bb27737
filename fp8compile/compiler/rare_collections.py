"""Python's collector of cycles while a graph is compiled: it looks at young objects, and rarely at all that there are.

Compiling makes objects by the million, and most of them live until it is done. By its usual thresholds the collector looks
at all objects of the process again and again, those of torch and of libraries too: 2 s of the 57 that 8 Llama layers take.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
RARE = (10_000, 50, 1_000)  # 700, 10, 10 is usual


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Thresholds of ``gc`` are RARE inside. Those that are higher stay, and a collector that is off stays off."""
    before = gc.get_threshold()
    if not 0 < before[0] < RARE[0]:
        yield
        return
    gc.set_threshold(*RARE)
    try:
        yield
    finally:
        if gc.get_threshold() == RARE:  # nobody else has set them
            gc.set_threshold(*before)


def with_rare_collections(compile_graph: Callable[P, T]) -> Callable[P, T]:
    """A compiler of graphs that runs under them: a backward is compiled when it first runs."""

    @functools.wraps(compile_graph)
    def compiled(*args: P.args, **kwargs: P.kwargs) -> T:
        with rare_collections():
            return compile_graph(*args, **kwargs)

    return compiled
