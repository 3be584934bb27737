"""How a command ends: its exit code, and an error as one line on standard error."""

from __future__ import annotations

import sys

DONE, FAILED, WRONG, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 130, 141
EXIT_CODES = (
    f"Exit codes: {DONE} done, {FAILED} failed, {WRONG} wrong command line, {INTERRUPTED} interrupted, "
    f"{PIPE_CLOSED} output pipe closed."
)


class Wrong(ValueError):
    """The command line names something that is not there."""


def said(command: str, error: object, code: int) -> int:
    """Print the error as one line; returns ``code``."""
    print(f"fp8compile {command}: error: {error}", file=sys.stderr)
    return code


def one_line(error: BaseException) -> str:
    """The exception and, where it was raised from others, the first of those: ``LookupError: no such; caused by ...``.

    Dynamo's wrapper around a backend's error is taken off.
    """
    error = getattr(error, "inner_exception", error)
    cause = error
    while (before := _raised_from(cause)) is not None:
        cause = before
    named = _named(error)
    text = getattr(cause, "strerror", None) or _first_line(cause)
    return named if text in named else f"{named}; caused by {_named(cause)}"


def _raised_from(error: BaseException) -> BaseException | None:
    """The exception that caused ``error``. Dynamo's own errors are raised from None and keep it in ``__context__``."""
    hidden = type(error).__module__ == "torch._dynamo.exc"
    return error.__cause__ or (error.__context__ if hidden else None)


def _named(error: BaseException) -> str:
    text = _first_line(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")
