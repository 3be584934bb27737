"""Who watches while the passes run: nobody, unless a dump, a trace or ``explain`` asks (fp8compile/compiler/dump.py).

The passes do not know of a watcher, and it changes nothing: it is part neither of what is compiled nor of its key.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Protocol


class PassWatcher(Protocol):
    """Takes a snapshot before and after each pass on the graphs being compiled."""

    def look(self, seen: Any, half: str) -> Any: ...

    def step(self, name: str, before: Any, after: Any) -> None: ...


_watcher: ContextVar[PassWatcher | None] = ContextVar("fp8compile_watcher", default=None)
_half: ContextVar[str] = ContextVar("fp8compile_half", default="")


@contextlib.contextmanager
def watch_passes(watcher: PassWatcher | None, half: str = "") -> Iterator[None]:
    """Let ``watcher`` watch the passes that run within this context, on ``half`` of a graph where that is known; None: nobody
    watches."""
    tokens = _watcher.set(watcher), _half.set(half)
    try:
        yield
    finally:
        _watcher.reset(tokens[0])
        _half.reset(tokens[1])


def is_watched() -> bool:
    """Whether somebody watches the passes."""
    return _watcher.get() is not None


def watched_then_too(inner: Callable[..., Any]) -> Callable[..., Any]:
    """An inner compiler of Inductor, watched by who watches now: code of a backward is generated when it first runs."""
    watcher = _watcher.get()
    if watcher is None:
        return inner

    @functools.wraps(inner)
    def watched(*args: Any, **kwargs: Any) -> Any:
        half = "backward" if kwargs.get("is_backward") else "" if kwargs.get("is_inference") else "forward"
        with watch_passes(watcher, half):
            return inner(*args, **kwargs)

    return watched


def show_made(name: str, before: Any, after: Any) -> None:
    """Show to who watches that ``after`` was made of ``before``, one graph of two."""
    watcher = _watcher.get()
    if watcher is not None:
        watcher.step(name, watcher.look(before, ""), watcher.look(after, ""))


def run_watched(name: str, seen: Any, run: Callable[[], Any]) -> Any:
    """What ``run``, a pass on ``seen``, returns: the two halves if it cuts a graph, None if it is switched off."""
    watcher = _watcher.get()
    if watcher is None:
        return run()
    before = watcher.look(seen, _half.get())
    result = run()
    if result is not None:
        watcher.step(name, before, watcher.look(result if isinstance(result, tuple) else seen, _half.get()))
    return result
