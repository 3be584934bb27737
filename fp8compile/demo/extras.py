"""The packages only the demo needs."""

from __future__ import annotations

import importlib

EXTRAS = ("transformers", "matplotlib")


class MissingExtra(ImportError):
    """A package of ``fp8compile[demo]`` is not installed; the message says how to get it."""


def require_extras() -> None:
    """Fail before the first step rather than after the last one.

    Raises:
        MissingExtra: names what is missing and the command that installs it.
    """
    missing = [name for name in EXTRAS if not _importable(name)]
    if missing:
        raise MissingExtra(
            f"the demo needs {' and '.join(missing)}, not installed here: pip install 'fp8compile[demo]'"
        )


def _importable(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True
