"""Arms without a device, to try a run by: each ends in its own way."""

from __future__ import annotations

import os
import time

from benchmarks.first.speaking import Told


def run(told: Told, how: str, *numbered: str) -> None:
    """``fine``, ``slow``, ``fails``, ``hangs``, ``hangs-timed``, ``memory``, ``missing`` or ``dies``."""
    told.say("compiling", how=how)
    if how == "fails":
        raise RuntimeError("as it was asked to")
    if how == "hangs":
        time.sleep(3600)
    if how == "memory":
        raise MemoryError("CUDA out of memory, as it was asked to")
    if how == "missing":
        raise ModuleNotFoundError("No module named 'torchao'", name="torchao")
    if how == "dies":
        os.abort()
    told.ready()
    if how == "hangs-timed":
        time.sleep(3600)
    told.say("timed", began_at=round(time.time(), 3))
    time.sleep(1.0 if how == "slow" else 0.05)
    told.say("timed through", at=round(time.time(), 3))
