"""The runs that a folder holds: its files of lines, at most two folders deep. No torch here.

A run's name is the path of its file without the ending: ``rank0``, ``lr-3e-4/rank0``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fp8compile.extras.watching.lines import ENDING
from fp8compile.extras.watching.reading import LoggedRun, NoRun, read_run

DEEPEST = 2  # folders below the one that is named
NO_FOLDER = (
    "there is no folder {}. Fix: name the folder that was given to fp8compile.extras.watching.watch(folder=...)"
)
EMPTY = "{} holds no run: no file rank*.jsonl that fp8compile.extras.watching.watch(folder=...) has written"


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


def runs_of(folder: Path) -> Iterator[LoggedRun]:
    """All runs of a folder, read.

    Raises:
        NoRun: no such folder, no run in it, or one of another version.
    """
    files = files_of(folder)
    if not files:
        raise NoRun(EMPTY.format(folder))
    for name, path in files.items():
        yield read_run(name, path)
