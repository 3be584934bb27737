"""Who looks on while the passes run: nobody, unless a dump, a trace or ``explain`` asks (fp8compile/compiler/dump.py).

The passes know nothing of it, and what looks on changes nothing: it is no part of what is compiled, nor of its key.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Protocol


class PassWatcher(Protocol):
    """Takes a snapshot before and after each pass of the graphs that compile meanwhile."""

    def look(self, seen: Any) -> Any: ...

    def step(self, name: str, before: Any, after: Any) -> None: ...


_watcher: ContextVar[PassWatcher | None] = ContextVar("fp8compile_watcher", default=None)


@contextlib.contextmanager
def watch_passes(watcher: PassWatcher) -> Iterator[None]:
    """Let ``watcher`` look on at the passes that run in here."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


def run_watched(name: str, seen: Any, run: Callable[[], Any]) -> Any:
    """What ``run``, a pass on ``seen``, returns: the two halves if it cuts a graph, None if it is switched off."""
    watcher = _watcher.get()
    if watcher is None:
        return run()
    before = watcher.look(seen)
    result = run()
    if result is not None:
        watcher.step(name, before, watcher.look(result if isinstance(result, tuple) else seen))
    return result
