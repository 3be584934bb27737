"""``fp8compile.extras.watching.watch`` and ``fp8compile watch``: a run as lines of JSON, and the page that draws them.

late, statistics, operands, states, memory    what is read of a step, and how it gets to the host without a wait
record, lines, run_file                       a step as one line
watcher, sends                                who sees a step, and who else gets its numbers
folder, reading, page, server, assets         the page; these and ``lines`` need no torch
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """``watch``, where it is first used: the page needs no torch."""
    if name != "watch":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fp8compile.extras.watching.watcher import watch

    return watch
