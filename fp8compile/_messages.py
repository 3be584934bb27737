"""The ends of error messages: "did you mean ...?"; another error in a line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], *, listed: bool = True) -> str:
    """ "Did you mean ...? Known: ...", for the end of an error message."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    meant = f" Did you mean {close[0]!r}?" if close else ""
    return f"{meant} Known: {', '.join(known)}." if listed else meant


def cause(error: BaseException) -> str:
    """An error's type and the first line of what it says; of what torch wrapped, the error inside."""
    inner = getattr(error, "inner_exception", None) or error
    return f"{type(inner).__name__}: {str(inner).splitlines()[0] if str(inner) else 'no message'}"
