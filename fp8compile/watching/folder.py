"""The runs that a folder holds: its files of lines, at most two folders deep. No torch here.

A run's name is the path of its file without the ending: ``rank0``, ``lr-3e-4/rank0``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8compile.watching.lines import ENDING, FAMILY, SCHEMA

DEEPEST = 2  # folders below the one that is named
MOST_STEPS = 20_000  # of a run in a snapshot; of longer ones steps are left out evenly
NO_FOLDER = "there is no folder {}. Fix: name the folder that was given to fp8compile.watch(folder=...)"
EMPTY = "{} holds no run: no file rank*.jsonl that fp8compile.watch(folder=...) has written"
OTHER_SCHEMA = "{} is written as {}, and this fp8compile reads {}: look at it with the fp8compile that wrote it"


class NoRun(ValueError):
    """There is nothing to show; the message says why, and what to do."""


def files_of(folder: Path) -> dict[str, Path]:
    """The files of runs by name, in the order of their names; links that lead out of the folder are left out.

    Raises:
        NoRun: there is no such folder.
    """
    if not folder.is_dir():
        raise NoRun(NO_FOLDER.format(folder))
    whole = folder.resolve()
    patterns = ["/".join([*("*",) * depth, f"rank*{ENDING}"]) for depth in range(DEEPEST + 1)]
    found = [path for pattern in patterns for path in folder.glob(pattern)]
    inside = [path for path in found if path.is_file() and path.resolve().is_relative_to(whole)]
    names = {path.relative_to(folder).as_posix().removesuffix(ENDING): path for path in inside}
    return dict(sorted(names.items(), key=lambda each: _by_number(each[0])))


def _by_number(name: str) -> tuple[str, int, str]:
    """``rank10`` stands behind ``rank9``."""
    at, _, rank = name.rpartition("rank")
    return at, int(rank) if rank.isdigit() else 0, name


@dataclass(frozen=True)
class Run:
    """A run as a snapshot holds it.

    Attributes:
        name: of its file.
        text: its lines, thinned; a last line without an end is kept as it is.
        steps: how many steps it has.
        left_out: how many of these are not in ``text``.
        corrupt: lines that are no JSON, but for a last one without an end.
        overflow: what the first step with an inf or NaN says; None where there was none.
    """

    name: str
    text: str
    steps: int
    left_out: int
    corrupt: int
    overflow: str | None


def read_run(name: str, path: Path, most: int = MOST_STEPS) -> Run:
    """Read a file as far as it is there.

    Raises:
        NoRun: it has a header of another version.
    """
    lines = path.read_bytes().decode("utf-8", "replace").split("\n")
    kept, steps, corrupt, overflow = list[tuple[str, bool]](), 0, 0, None
    for number, line in enumerate(lines):
        value = parsed(line)
        if value is None:
            corrupt += bool(line.strip()) and number < len(lines) - 1
            kept += [(line, True)] if line.strip() else []
            continue
        _check_schema(path, value)
        steps += "step" in value
        notable = "schema" in value or "overflow" in value or bool(value.get("skipped")) or "sqnr" in value
        kept.append((line, notable))
        overflow = overflow or (value.get("overflow") or {}).get("line")
    thin = max(1, -(-len(kept) // most))
    left = [
        line for at, (line, notable) in enumerate(kept) if notable or at % thin == 0 or at > len(kept) - most // 10
    ]
    ended = lines[-1] == ""
    return Run(name, "\n".join(left) + ("\n" if ended else ""), steps, len(kept) - len(left), corrupt, overflow)


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
        raise NoRun(OTHER_SCHEMA.format(path, schema if known else f"{str(schema)!r:.60}", SCHEMA))


def runs_of(folder: Path) -> Iterator[Run]:
    """All runs of a folder, read.

    Raises:
        NoRun: no such folder, no run in it, or one of another version.
    """
    files = files_of(folder)
    if not files:
        raise NoRun(EMPTY.format(folder))
    for name, path in files.items():
        yield read_run(name, path)
