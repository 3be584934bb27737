"""A run as text: a header, then a line of JSON a step. No torch here: the page's side reads it too.

    {"schema": "fp8compile.run/1", "session": "9f2c...", "rank": 0, "model": "Llama", "recipe": "...", ...}
    {"step": 1, "time": 1790000000.125, "seconds": 0.41, "loss": 5.54, "scale": 2.0, "headroom": 3.2, ...}

JSON has no NaN and no infinity. Such a number is null, and ``words`` says what it was:
``{"loss": null, "words": {"loss": "nan"}}``.

A key that a step has no value for is left out. Each start of a run writes a header of its own. Lines that follow it replace
those of the same step and of later ones before it, as a run that goes on from a checkpoint takes these steps again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

SCHEMA = "fp8compile.run/1"
FAMILY = "fp8compile.run/"
ENDING = ".jsonl"
DIGITS = 7  # of a number that is no count


def line_of_step(record: Mapping[str, Any]) -> str:
    """A step's record as one line, with its end."""
    words: dict[str, str] = {}
    plain = {name: _plain(value, name, words) for name, value in record.items()}
    return text_of(plain | ({"words": words} if words else {}))


def text_of(values: Mapping[str, Any]) -> str:
    """One line of JSON in ASCII, with its end: no text in it is a line's end to anybody."""
    return json.dumps(values, separators=(",", ":"), allow_nan=False) + "\n"


def _plain(value: Any, name: str, words: dict[str, str]) -> Any:
    """A value that JSON has; what it has not goes into ``words`` under its path."""
    if isinstance(value, Mapping):
        return {key: _plain(each, f"{name}.{key}", words) for key, each in value.items()}
    if not isinstance(value, float):
        return value
    if math.isfinite(value):
        return float(f"{value:.{DIGITS}g}") if name != "time" else round(value, 3)
    words[name] = "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return None


def scalars_of(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record by name, ``sqnr/exp_avg`` for those of a group; without the step and its time."""
    found: dict[str, float] = {}
    for name, value in record.items():
        several = value.items() if isinstance(value, Mapping) and name == "sqnr" else [("", value)]
        for part, number in several:
            if isinstance(number, (int, float)) and name not in ("step", "time"):
                found[f"{name}/{part}" if part else name] = float(number)
    return found
