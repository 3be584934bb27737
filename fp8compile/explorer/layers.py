"""Layers that are alike: neighbours in a list of modules in which the same operations stand on values of the same shapes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from fp8compile.explorer.homes import homes_of
from fp8compile.explorer.nodes import template
from fp8compile.fx.snapshot import Snapshot

NUMBERED = re.compile(r"(?:^|\.)\d+(?=\.|$)")


def alike(snapshot: Snapshot, more: Iterable[tuple[str, str]] = ()) -> list[list[Any]]:
    """``[path, first, last]`` of each run: ``["layers", 0, 11]`` for ``layers.0`` to ``layers.11``.

    ``more`` are pairs of a module and a text that modules must have in common to be alike: what was done in them.
    """
    found: dict[tuple[str, int], Counter[str]] = {}
    for module, text in [*_texts(snapshot), *more]:
        for match in NUMBERED.finditer(module):
            path, _, number = module[: match.end()].rpartition(".")
            inside = found.setdefault((path, int(number)), Counter())
            inside[f"{module[match.end() :]} {text}"] += 1
    return [run for path in dict.fromkeys(path for path, _ in found) for run in _runs(path, found)]


def _texts(snapshot: Snapshot) -> Iterable[tuple[str, str]]:
    for part in snapshot.parts:
        homes = homes_of(part)
        for line in part.lines:
            source = line.spliced.partition("(")[0]
            yield homes[line.name].module, f"{part.title} {line.op} {line.value} {template(line)} {source}"


def _runs(path: str, found: Mapping[tuple[str, int], Counter[str]]) -> Iterable[list[Any]]:
    numbers = sorted(number for where, number in found if where == path)
    kinds: list[Counter[str]] = []

    def key(pair: tuple[int, int]) -> tuple[int, int]:
        at, number = pair
        held = found[path, number]
        if held not in kinds:
            kinds.append(held)
        return kinds.index(held), number - at

    for _, run in groupby(enumerate(numbers), key):
        members = [number for _, number in run]
        if len(members) > 1:
            yield [path, members[0], members[-1]]
