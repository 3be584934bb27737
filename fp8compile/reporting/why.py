"""Why one module is as it is: what the passes did in it and under it, and what they left."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from fp8compile._messages import nearest
from fp8compile._text import printed
from fp8compile.reporting.entries import Notes
from fp8compile.reporting.entry import Entry
from fp8compile.reporting.tables import Entries, table_of

NOTHING = "nothing made in it is saved for backward, it runs no linear, and it holds no FP32 island"


@dataclass(frozen=True)
class Why:
    """What was done in a module and all under it: ``str()`` shows it in tables, ``notes`` holds the entries."""

    module: str
    notes: Notes

    def __str__(self) -> str:
        kinds = [Entries(kind, getattr(self.notes, name)) for name, kind in Notes.ENTRIES.items()]
        parts = [part for entries in kinds for part in table_of(entries)]
        return printed([f"in {self.module}:", *(parts or [NOTHING])], wrap=True, width=None)


def why(module: str, notes: Notes, modules: Set[str]) -> Why:
    """The part of ``notes`` that is about a module of ``modules``. See ``Report.why``."""
    entries = [entry for name in Notes.ENTRIES for entry in getattr(notes, name)]
    known = modules | {entry.origin.module for entry in entries}
    if not any(_is_under(path, module) for path in known):
        raise ValueError(f"why: this model has no module {module!r}.{nearest(module, known - {''}, listed=False)}")
    found = {name: tuple(e for e in getattr(notes, name) if _is_in(e, module)) for name in Notes.ENTRIES}
    return Why(module, Notes(**found))


def _is_in(entry: Entry, module: str) -> bool:
    return _is_under(entry.origin.module, module)


def _is_under(path: str, module: str) -> bool:
    return not module or path == module or path.startswith(f"{module}.")
