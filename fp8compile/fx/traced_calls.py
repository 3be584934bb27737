"""Calls that keep their names where they are traced: what a dump shows in one line (``written.py``)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from fp8compile import _torch as private
from fp8compile.fx.graph import SPLICED


@contextlib.contextmanager
def call_of(name: str) -> Iterator[None]:
    """Operations inside are one call, ``encode(exp_avg)``, in a graph that is being traced. Elsewhere nothing happens."""
    mode = private.get_proxy_mode()
    if mode is None:
        yield
        return
    nodes = mode.tracer.graph.nodes
    last = next(iter(reversed(nodes)), None)
    yield
    for node in reversed(nodes):
        if node is last:
            break
        node.meta.setdefault(SPLICED, name)
