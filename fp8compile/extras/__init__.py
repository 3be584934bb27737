"""What stands beside the backend, each room by itself: nothing of the core imports it, and no room another.

demo       ``fp8compile demo``: a small Llama with and without fp8compile, compared
links      codes on what pipeline stages send to one another, and DDP ranks
planning   ``fp8compile plan``: memory and traffic per GPU of a large model, by arithmetic
watching   a training run written down and shown as a page
"""

from __future__ import annotations

import importlib
from typing import Any

_ROOMS = ("demo", "links", "planning", "watching")


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_ROOMS)
