"""Files that pages are made of: our own beside the module that names them, other people's in ``vendor``.

``vendor/VENDORED.json`` lists each library: name, version, licence, where it is from, and its files with their SHA-256.
"""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

VENDOR = Path(__file__).parent / "vendor"


@functools.cache
def vendored(name: str) -> str:
    """The text of a file in ``vendor``.

    Raises:
        ValueError: it is not listed there, or it is not the file that was taken over.
    """
    listed = {file: digest for library in libraries() for file, digest in library["files"].items()}
    if name not in listed:
        raise ValueError(f"{name} is not listed in {VENDOR / 'VENDORED.json'}, which lists {sorted(listed)}")
    data = (VENDOR / name).read_bytes()
    if hashlib.sha256(data).hexdigest() != listed[name]:
        raise ValueError(
            f"{VENDOR / name} is not the file that was taken over: its SHA-256 differs; install fp8compile again"
        )
    return data.decode()


def libraries() -> list[dict[str, Any]]:
    """What ``VENDORED.json`` says, library by library."""
    found: list[dict[str, Any]] = json.loads((VENDOR / "VENDORED.json").read_text())
    return found
