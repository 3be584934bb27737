"""Who watches while the passes run: nobody, unless a dump, a trace or ``explain`` asks (fp8compile/compiler/dump.py).

The passes do not know of a watcher, and it changes nothing: it is part neither of what is compiled nor of its key.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Protocol


class PassWatcher(Protocol):
    """Takes a snapshot before and after each pass on the graphs being compiled."""

    def look(self, seen: Any) -> Any: ...

    def step(self, name: str, before: Any, after: Any) -> None: ...


_watcher: ContextVar[PassWatcher | None] = ContextVar("fp8compile_watcher", default=None)


@contextlib.contextmanager
def watch_passes(watcher: PassWatcher) -> Iterator[None]:
    """Let ``watcher`` watch the passes that run within this context."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


def is_watched() -> bool:
    """Whether somebody watches the passes."""
    return _watcher.get() is not None


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
