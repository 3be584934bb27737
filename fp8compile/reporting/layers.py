"""Layers that are alike as one row: ``layers.0.mlp`` to ``layers.31.mlp`` are ``layers.0-31.mlp``, thirty-two times."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a part of a module path that is a number


@dataclass(frozen=True)
class Row:
    """One line of a table: a module path, the other cells, and how many entries it stands for.

    ``sums`` are what adds up over entries, bytes say; rows are alike where their cells are equal and so is their path, but
    for numbers in it.
    """

    module: str
    cells: tuple[str, ...]
    sums: tuple[int, ...] = ()
    times: int = 1


def collapsed(rows: Iterable[Row]) -> list[Row]:
    """Rows that are alike as one, in the order in which they first appear."""
    groups: dict[tuple[str, tuple[str, ...]], list[Row]] = {}
    for row in rows:
        groups.setdefault((_NUMBER.sub("#", row.module), row.cells), []).append(row)
    return [_one(group) for group in groups.values()]


def _one(rows: Sequence[Row]) -> Row:
    sums = tuple(map(sum, zip(*(row.sums for row in rows), strict=True)))
    return Row(_paths([row.module for row in rows]), rows[0].cells, sums, sum(row.times for row in rows))


def _paths(modules: Sequence[str]) -> str:
    """Paths that differ in numbers alone as one path with ranges."""
    numbers = [tuple(map(int, _NUMBER.findall(module))) for module in modules]
    ranges = iter([_ranges(sorted(set(column))) for column in zip(*numbers, strict=True)])
    return _NUMBER.sub(lambda _: next(ranges), modules[0])


def _ranges(numbers: Sequence[int]) -> str:
    """``[0, 1, 2, 5] -> "0-2,5"``."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in found)
