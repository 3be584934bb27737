"""Calls that keep their names where they are traced: what a dump shows in one line (``written.py``)."""

from __future__ import annotations

from contextlib import AbstractContextManager

from fp8compile.fx.graph import SPLICED
from fp8compile.fx.tracing import marked


def call_of(name: str) -> AbstractContextManager[None]:
    """Operations inside are one call, ``encode(exp_avg)``, in a graph that is being traced."""
    return marked(SPLICED, name)
