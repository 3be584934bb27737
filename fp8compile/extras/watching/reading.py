"""A run's file, read as far as it is there, for a page that holds it. No torch here.

A line that is no JSON is counted and left out, but for a last one without an end, which is still being written. A step that
comes again, after a start from a checkpoint, takes the place of itself and of all later ones.

An overflow begins in a step that is inf or NaN where the step before was not, or where it was so first in another layer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8compile.extras.watching.lines import FAMILY, SCHEMA

MOST_LINES = 20_000  # of a run in a snapshot; of longer ones lines are left out evenly
OTHER_SCHEMA = "{} is written as {}, and this fp8compile reads {}: look at it with the fp8compile that wrote it"


class NoRun(ValueError):
    """There is nothing to show; the message says why, and what to do."""


@dataclass(frozen=True)
class LoggedRun:
    """A run as a snapshot holds it.

    Attributes:
        name: of its file.
        text: its lines, thinned; a last line without an end is kept as it is.
        steps: how many steps it has.
        left_out: how many of its lines are not in ``text``, but for the corrupt ones.
        corrupt: lines that are no JSON, but for a last one without an end.
        overflows: what each step says in which an overflow began.
    """

    name: str
    text: str
    steps: int
    left_out: int
    corrupt: int
    overflows: tuple[str, ...]


@dataclass(frozen=True)
class _Line:
    """A line, its step (None: a header, or a last one without an end), and what of it is rare."""

    text: str
    step: int | None
    place: tuple[str, str] | None = None  # where the first inf or NaN of the step was
    said: str = ""
    skipped: bool = False
    sampled: bool = False


def read_run(name: str, path: Path, most: int = MOST_LINES) -> LoggedRun:
    """Read a file as far as it is there; of more than ``most`` lines some are left out.

    Raises:
        NoRun: it has a header of another version.
        OSError: it cannot be read.
    """
    texts = path.read_bytes().decode("utf-8", "replace").split("\n")
    kept, corrupt = list[_Line](), 0
    for number, text in enumerate(texts):
        line = _line_of(text, path)
        if line is None:
            if number < len(texts) - 1:
                corrupt += bool(text.strip())
            elif text:
                kept.append(_Line(text, None))
            continue
        _take_back(kept, line.step)
        kept.append(line)
    begins = _begins(kept)
    left = _thinned(kept, begins, most)
    steps = sum(line.step is not None for line in kept)
    end = "\n" if left and texts[-1] == "" else ""
    said = tuple(kept[at].said for at in begins)
    return LoggedRun(name, "\n".join(line.text for line in left) + end, steps, len(kept) - len(left), corrupt, said)


def _line_of(text: str, path: Path) -> _Line | None:
    value = parsed(text)
    if value is None:
        return None
    _check_schema(path, value)
    step, overflow = value.get("step"), value.get("overflow")
    if not isinstance(step, int):
        return _Line(text, None) if "schema" in value else None
    skipped, sampled = value.get("skipped") is True, "sqnr" in value
    if not isinstance(overflow, dict):
        return _Line(text, step, skipped=skipped, sampled=sampled)
    layers = overflow.get("layers")
    first = layers[0] if isinstance(layers, list) and layers and isinstance(layers[0], dict) else {}
    place = str(first.get("module", "")), str(first.get("direction", ""))
    return _Line(text, step, place, str(overflow.get("line", "")), skipped, sampled)


def parsed(line: str) -> dict[str, Any] | None:
    """A line's values; None for one that is no JSON object."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _check_schema(path: Path, value: dict[str, Any]) -> None:
    schema = value.get("schema", SCHEMA)
    if schema != SCHEMA:
        known = str(schema).startswith(FAMILY)
        raise NoRun(OTHER_SCHEMA.format(path, f"{schema if known else repr(str(schema)):.60}", SCHEMA))


def _take_back(kept: list[_Line], step: int | None) -> None:
    """Take out what a step that comes again replaces."""
    last = next((line.step for line in reversed(kept) if line.step is not None), None)
    if step is not None and last is not None and last >= step:
        kept[:] = [line for line in kept if line.step is None or line.step < step]


def _begins(lines: Sequence[_Line]) -> list[int]:
    """The indices of the steps in which an overflow begins."""
    steps = [at for at, line in enumerate(lines) if line.step is not None]
    before = [None, *(lines[at].place for at in steps)]
    return [at for at, place in zip(steps, before, strict=False) if lines[at].place not in (None, place)]


def _thinned(lines: Sequence[_Line], begins: Sequence[int], most: int) -> list[_Line]:
    """All lines, or some ``most`` of them: headers, the last, and of rare ones and of others so many that they stay even."""
    if len(lines) <= most:
        return list(lines)
    rare = [at for at, line in enumerate(lines) if line.step is None or line.skipped or line.sampled]
    rare = sorted({*rare, *begins})
    others = sorted(set(range(len(lines))).difference(rare))
    half = max(1, most // 2)
    chosen = {at for some in (rare, others) for at in some[:: -(-len(some) // half) or 1]}
    always = {0, len(lines) - 1, *begins[:half]}
    return [lines[at] for at in sorted(chosen | always)]
