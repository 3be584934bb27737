"""State formats as a user writes them: a name, an alias, or a pair for first moments and for second."""

from __future__ import annotations

from fp8compile.numerics.states.registry import ALIASES, STATE_FORMATS, state_codec

StateFormat = str | tuple[str, str]


def state_format_pair(state_format: StateFormat) -> tuple[str, str]:
    """``state_format`` as two formats: for the states that may be negative, and for those that never are.

    Raises:
        ValueError: a format that does not exist, or does not fit.
    """
    found = ALIASES.get(state_format, (state_format, state_format)) if isinstance(state_format, str) else state_format
    if not (isinstance(found, (tuple, list)) and len(found) == 2):
        raise ValueError(
            f"state_format {state_format!r}: one of {', '.join((*STATE_FORMATS, *ALIASES))}, or a pair of them, for "
            "first moments and for second"
        )
    for name, signed in zip(found, (True, False), strict=True):
        state_codec(name, signed=signed)
    return found[0], found[1]
