"""Layers that are alike as one row: ``layers.0.mlp`` to ``layers.31.mlp`` are ``layers.0-31.mlp``, thirty-two times."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a part of a module path that is a number


@dataclass(frozen=True)
class LayerRow:
    """One line of a table: a module path, the other cells, and how many entries it stands for.

    ``sums`` are the figures that add up over entries, such as bytes. Rows are alike where their cells are equal and their
    paths differ at most in numbers.
    """

    module: str
    cells: tuple[str, ...]
    sums: tuple[int, ...] = ()
    times: int = 1


def collapsed(rows: Iterable[LayerRow]) -> list[LayerRow]:
    """Join rows that are alike, in the order in which they first appear."""
    groups: dict[tuple[str, tuple[str, ...]], list[LayerRow]] = {}
    for row in rows:
        groups.setdefault((_NUMBER.sub("#", row.module), row.cells), []).append(row)
    return [row for group in groups.values() for row in _joined(group)]


def _joined(rows: Sequence[LayerRow]) -> list[LayerRow]:
    """Join rows whose paths differ only in numbers, if the joined ranges stand for just these paths; else path by path."""
    numbers = {tuple(map(int, _NUMBER.findall(row.module))) for row in rows}
    columns = [sorted(set(column)) for column in zip(*numbers, strict=True)]
    if math.prod(map(len, columns)) != len(numbers):
        return [_one(group, group[0].module) for group in _by_path(rows)]
    ranges = iter(map(_ranges, columns))
    return [_one(rows, _NUMBER.sub(lambda _: next(ranges), rows[0].module))]


def _by_path(rows: Sequence[LayerRow]) -> list[list[LayerRow]]:
    found: dict[str, list[LayerRow]] = {}
    for row in rows:
        found.setdefault(row.module, []).append(row)
    return list(found.values())


def _one(rows: Sequence[LayerRow], module: str) -> LayerRow:
    sums = tuple(map(sum, zip(*(row.sums for row in rows), strict=True)))
    return LayerRow(module, rows[0].cells, sums, sum(row.times for row in rows))


def _ranges(numbers: Sequence[int]) -> str:
    """``[0, 1, 2, 5] -> "0-2,5"``."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in found)
