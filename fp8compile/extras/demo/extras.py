"""The packages that only the demo and the ablations need."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

EXTRAS = ("transformers", "matplotlib")


class MissingExtra(ImportError):
    """A package of ``fp8compile[demo]`` is not installed; the message says how to get it."""


def require_extras(names: Sequence[str] = EXTRAS, what: str = "the demo") -> None:
    """Fail before the first step rather than after the last one.

    Args:
        names: of the packages.
        what: needs them.

    Raises:
        MissingExtra: names what is missing and the command that installs it.
    """
    missing = [name for name in names if not _importable(name)]
    if missing:
        raise MissingExtra(
            f"{what} needs {' and '.join(missing)}, not installed here: pip install 'fp8compile[demo]'"
        )


def _importable(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True
