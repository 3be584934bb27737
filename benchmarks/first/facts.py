"""Facts: a JSON line each, appended as soon as it is known, so that whatever cuts a run off loses what was not known yet.

    {"job": "layer-default-7b", "t": 91.2, "what": "layer", "ms": ..., "device": ..., "versions": {...}, "commit": ...}

An arm's last fact is ``end``, with its outcome. An arm without one was cut off, and is run again.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Fact = Mapping[str, Any]
END = "end"
DONE, FAILED, MISSING, NO_MEMORY, LATE, DIED = (
    "done",
    "failed",
    "a peer is missing",
    "out of memory",
    "over its limit",
    "its process died",
)


def append(path: Path, fact: Fact) -> None:
    """Add a line by one write: arms share the file."""
    line = (json.dumps(fact) + "\n").encode()
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, line)
    finally:
        os.close(file)


def read(path: Path) -> list[dict[str, Any]]:
    """All facts of a file; a line that a kill cut in half is none."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def mended(path: Path) -> None:
    """End a last line that was cut in half, so that the next fact has one of its own."""
    if path.exists() and (content := path.read_bytes()) and not content.endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")


def outcomes(facts: Iterable[Fact]) -> dict[str, str]:
    """How each arm that ended did, by its name."""
    return {fact["job"]: fact.get("outcome", DONE) for fact in facts if fact["what"] == END}
