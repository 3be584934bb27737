"""Which module each node is drawn in, and which nodes are drawn as one.

An operation is in the module that made it. What fp8compile put in, and inputs, have no module of their own:

    encode(x)       where x is made; of an input, where the codes are read
    decode(...)     where the value is read
    an input        where it is read
    a sum of autograd's     in the module that its summands share

An encode, a decode, an FP32 island is a group: one node until it is opened.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from fp8compile.fx.folding import as_one, calls
from fp8compile.fx.listing import GraphPart, Line

ISLAND = "FP32 island"
MADE, READ, SUM = "made", "read", "sum"  # who lends a module
ROUNDS = 12  # codes of codes: each round gives a module to those whose neighbours have one


@dataclass(frozen=True)
class Home:
    """Where a node is drawn: in a module, and in it in a group, ``label #first member``, or in none: ""."""

    module: str
    group: str = ""


def homes_of(part: GraphPart) -> dict[str, Home]:
    """The home of each node of a graph, by name."""
    known = {line.name: line for line in part.lines}
    readers: dict[str, list[str]] = {}
    for line in part.lines:
        for name in line.reads:
            readers.setdefault(name, []).append(line.name)
    groups = list(_groups(part.lines, known, readers))
    modules = {line.name: line.module for line in part.lines}
    _lend(part.lines, groups, modules, readers)
    homes = {name: Home(module) for name, module in modules.items()}
    for label, members in groups:
        home = Home(modules[members[0].name], f"{label} #{members[0].name}" if len(members) > 1 else "")
        homes |= {line.name: home for line in members}
    return homes


def _groups(
    lines: Sequence[Line], known: Mapping[str, Line], readers: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, list[Line]]]:
    reading = {name: set(names) for name, names in readers.items()}
    for call in calls(lines):
        yield (as_one(call, known, reading).op.partition(",")[0], call)
    island: list[Line] = []
    for line in lines:
        if island and not (line.was and line.module == island[0].module):
            yield (ISLAND, island)
            island = []
        if line.was:
            island = [*island, line]
    if island:
        yield (ISLAND, island)


@dataclass(frozen=True)
class _Borrower:
    """Nodes without a module, what they read, their readers, and which of these are asked first."""

    names: tuple[str, ...]
    made: tuple[str, ...]
    read: tuple[str, ...]
    by: str = MADE

    def module(self, modules: Mapping[str, str]) -> str:
        """The module that a neighbour lends; "" where none has one yet."""
        made, read = ([modules[n] for n in names if modules[n]] for names in (self.made, self.read))
        if self.by == SUM:
            return _shared(made) or made[-1].rpartition(".")[0] or made[-1] if made else ""
        wanted = read if self.by == READ else made or read
        return _shared(wanted) or wanted[0] if wanted else ""


def _lend(
    lines: Sequence[Line],
    groups: Iterable[tuple[str, Sequence[Line]]],
    modules: dict[str, str],
    readers: Mapping[str, Sequence[str]],
) -> None:
    """Give a module to groups, inputs and sums of gradients that have none: from those they read, or from their readers."""
    waiting = [*_units(groups, readers), *_sums(lines), *_inputs(lines, readers)]
    for _ in range(ROUNDS):
        later = []
        for each in waiting:
            module = each.module(modules)
            modules |= dict.fromkeys(each.names, module)
            later += [] if module else [each]
        if len(later) == len(waiting):  # a decode of what nobody reads in a module, say
            later = [dataclasses.replace(each, by=MADE) for each in later if each.by == READ and each.made]
        waiting = later


def _units(groups: Iterable[tuple[str, Sequence[Line]]], readers: Mapping[str, Sequence[str]]) -> Iterator[_Borrower]:
    for label, members in groups:
        if any(line.module for line in members):
            continue
        names = tuple(line.name for line in members)
        inside = set(names)
        made = tuple(n for line in members for n in line.reads if n not in inside)
        read = tuple(n for line in members for n in readers.get(line.name, ()) if n not in inside)
        yield _Borrower(names, made, read, READ if label.startswith("decode") else MADE)


def _sums(lines: Iterable[Line]) -> Iterator[_Borrower]:
    """Autograd adds the gradients of a value that is read twice, in no module: with that of the later gradient's parent."""
    late: set[str] = set()
    for line in lines:
        if line.name.startswith("tangents") or not late.isdisjoint(line.reads):
            late.add(line.name)
            if line.op == "aten.add.Tensor" and not line.module and not line.spliced:
                yield _Borrower((line.name,), line.reads, (), SUM)


def _inputs(lines: Iterable[Line], readers: Mapping[str, Sequence[str]]) -> Iterator[_Borrower]:
    for line in lines:
        if line.kind == "input" and not line.module:
            yield _Borrower((line.name,), (), tuple(readers.get(line.name, ())), READ)


def _shared(modules: Sequence[str]) -> str:
    """The innermost module that holds all of these; "" where only the model does."""
    parts = zip(*(path.split(".") for path in modules), strict=False)
    return ".".join(each[0] for each in takewhile(lambda each: len(set(each)) == 1, parts))
