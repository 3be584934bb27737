"""Entries of a report as a sequence that prints itself as a table and converts to rows for pandas and JSON."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

from rich.table import Table

from fp8compile._text import columns_of, human, printed, table, terminal_width
from fp8compile.reporting.entries import (
    RECIPE,
    SAVED,
    Chunked,
    Collective,
    Island,
    Linear,
    Observed,
    Offloaded,
    Recomputed,
    SavedEntry,
    Skip,
)
from fp8compile.reporting.entry import Entry
from fp8compile.reporting.layers import LayerRow, collapsed

E = TypeVar("E", bound=Entry)

DIRECTIONS = ("forward", "dgrad", "wgrad")


class Entries(tuple[E, ...], Generic[E]):
    """The entries of one kind. ``print`` shows them as a table: layers that are alike once, largest first.

    ``times`` says of each entry how often its graph runs in a step; bytes in the table are multiplied by it.
    """

    kind: type[Entry]
    times: tuple[int, ...]

    def __new__(cls, kind: type[E], entries: Iterable[E] = (), times: Iterable[int] | None = None) -> Entries[E]:
        made = super().__new__(cls, tuple(entries))
        made.kind = kind
        made.times = tuple(times) if times is not None else (1,) * len(made)
        return made

    def rows(self) -> list[dict[str, Any]]:
        """One flat dictionary an entry, for ``pandas.DataFrame(report.saved.rows())``; bytes are of one run."""
        return [_flat(entry) | {"runs": times} for entry, times in zip(self, self.times, strict=True)]

    def to_json(self) -> str:
        """``rows()`` as JSON."""
        return json.dumps(self.rows(), indent=1)

    def __str__(self) -> str:
        return printed(table_of(self), wrap=True, width=None) if self else f"no {_TITLES[self.kind][1]}"


def table_of(entries: Entries[Any], most: int | None = None, columns: int | None = None) -> list[Any]:
    """What ``printed`` takes: a title and a table, of its ``most`` largest rows; nothing where there are no entries.

    Skips get a table for each reason. Cells that do not fit in ``columns`` (by default the terminal's) are left out.
    """
    if not entries:
        return []
    rows = collapsed(_rows_of_linears(entries) if entries.kind is Linear else map(_row, entries, entries.times))
    rows.sort(key=lambda row: row.sums[:1], reverse=True)
    count = sum(entries.times)
    title = f"{count} {_TITLES[entries.kind][count != 1]}"
    if most is not None and len(rows) > most:
        title, rows = f"{title}, the largest {most} of {len(rows)} rows", rows[:most]
    names, sizes = _COLUMNS[entries.kind]
    if entries.kind is not Skip:
        return [title, _fitted(rows, names, sizes, columns or terminal_width())]
    parts: list[Any] = [title]
    for reason, of in _by_reason(rows).items():
        total = sum(row.sums[0] for row in of)
        parts.append(f"{sum(row.times for row in of)} x {reason}{f' ({human(total)})' if total else ''}")
        parts.append(_fitted(of, names, sizes, columns or terminal_width()))
    return parts


def _by_reason(rows: Iterable[LayerRow]) -> dict[str, list[LayerRow]]:
    """Rows grouped by reason, the one with the most bytes first. The reason is a row's last cell and is removed from it."""
    found: dict[str, list[LayerRow]] = {}
    for row in rows:
        found.setdefault(row.cells[-1], []).append(LayerRow(row.module, row.cells[:-1], row.sums, row.times))
    return dict(sorted(found.items(), key=lambda item: -sum(row.sums[0] for row in item[1])))


def _fitted(rows: Sequence[LayerRow], names: Sequence[str], sizes: Sequence[str], columns: int) -> Table:
    """The table, without the cells that do not fit: sources go first, then operations, shapes, formats."""
    shown = [at for at in range(len(names)) if any(row.cells[at] for row in rows)]
    for name in ("source", "op", "shape", "scales", "codec", ""):
        header = ("module", "", *(names[at] for at in shown), *sizes)
        cells = [_texts(row) for row in collapsed(_with_cells(row, shown) for row in rows)]
        if not name or columns_of(header, cells) <= columns:
            break
        shown = [at for at in shown if names[at] != name]
    return table("", header, cells, whole=True)


def _with_cells(row: LayerRow, shown: Iterable[int]) -> LayerRow:
    return LayerRow(row.module, tuple(row.cells[at] for at in shown), row.sums, row.times)


def _texts(row: LayerRow) -> tuple[str, ...]:
    sums = (human(nbytes) if nbytes else "-" for nbytes in row.sums)
    return row.module or "-", f"x{row.times}", *row.cells, *sums


_TITLES: dict[type[Entry], tuple[str, str]] = {  # of one, of several or none
    Linear: ("matmul of a linear in FP8 or INT8", "matmuls of linears in FP8 or INT8"),
    Island: ("FP32 island", "FP32 islands"),
    SavedEntry: ("tensor stored as codes", "tensors stored as codes"),
    Skip: ("left as it is", "left as they are"),
    Recomputed: ("tensor recomputed", "tensors recomputed"),
    Observed: ("value observed", "values observed"),
    Collective: ("exchange of codes between ranks", "exchanges of codes between ranks"),
    Offloaded: ("tensor of codes on the host", "tensors of codes on the host"),
    Chunked: ("matrix of logits computed in chunks", "matrices of logits computed in chunks"),
}

# For each kind of entry the columns of its cells, and those of its sums.
_COLUMNS: dict[type[Entry], tuple[tuple[str, ...], tuple[str, ...]]] = {
    Linear: (("M", "K", "N", *DIRECTIONS, "scales", "source"), ()),
    Island: (("op", "nodes", "matmuls", "source", "why"), ("larger by",)),
    SavedEntry: (("op", "shape", "source", "codec"), ("bytes", "as codes")),
    Skip: (("what", "op", "shape", "source"), ("bytes",)),
    Recomputed: (("op", "shape", "source", "recomputed by"), ("bytes",)),
    Observed: (("op", "shape", "kind", "direction", "source"), ()),
    Collective: (("operation", "shape", "ranks", "source", "codec"), ("a rank sends", "as codes")),
    Offloaded: (("op", "shape", "source", "us each way", "us waited for"), ("bytes",)),
    Chunked: (("shape", "chunks of rows", "of columns", "source", "form"), ("bytes", "a chunk")),
}


def _row(entry: Entry, times: int) -> LayerRow:
    cells, sums = _cells(entry)
    return LayerRow(entry.origin.module, cells, tuple(s * times for s in sums), times)


def _cells(entry: Entry) -> tuple[tuple[str, ...], tuple[int, ...]]:
    op, shape, source = _short(entry.origin.op), str(entry.info), line_of(entry)
    if isinstance(entry, SavedEntry):
        return (op, shape, source, entry.codec), (entry.bytes_before, entry.bytes_after)
    if isinstance(entry, Skip):
        what = "" if entry.kind == SAVED else f"{entry.kind} {entry.direction}".strip()
        return (what, op, "-" if entry.kind == RECIPE else shape, source, entry.reason), (entry.bytes,)
    if isinstance(entry, Recomputed):
        return (op, shape, source, "fp8compile" if entry.sources else "the min-cut"), (entry.bytes_before,)
    if isinstance(entry, Island):
        return (op, str(entry.nodes), str(entry.matmuls), source, entry.reason), (entry.bytes_added,)
    if isinstance(entry, Collective):
        return (entry.operation, shape, str(entry.ranks), source, entry.codec), (entry.sent_plain, entry.sent)
    if isinstance(entry, Offloaded):
        return (op, shape, source, f"{entry.us:,.0f}", f"{entry.waits_us:,.0f}"), (entry.bytes,)
    if isinstance(entry, Chunked):
        chunks = f"{entry.forward} + {entry.sums}" if entry.sums else str(entry.forward), str(entry.backward)
        return (shape, *chunks, source, entry.form), (entry.bytes_before, entry.bytes_after)
    assert isinstance(entry, Observed)
    return (op, shape, entry.kind, entry.direction, source), ()


def _short(op: str) -> str:
    """``mm.default -> mm``: the operation without its overload."""
    return re.sub(r"\.\w+", "", op).lstrip("_")


def _rows_of_linears(entries: Entries[Linear]) -> list[LayerRow]:
    """A row for each linear: its sizes, and the formats of forward, dgrad and wgrad."""
    found: dict[tuple[str, str], list[tuple[Linear, int]]] = {}
    for entry, times in zip(entries, entries.times, strict=True):
        found.setdefault((entry.origin.module, entry.origin.source), []).append((entry, times))
    return [_row_of_linear([linear for linear, _ in of], of[0][1]) for of in found.values()]


def _row_of_linear(matmuls: Sequence[Linear], times: int) -> LayerRow:
    first = next((m for m in matmuls if m.direction == DIRECTIONS[0]), matmuls[0])
    formats = {m.direction: " ".join(m.formats.split()[:3]) for m in matmuls}  # e4m3 x e4m3
    how = ", ".join(dict.fromkeys(" ".join(m.formats.split()[3:]) for m in matmuls))
    calls = max(sum(m.direction == d for m in matmuls) for d in DIRECTIONS)
    cells = (
        str(first.M),
        str(first.K),
        str(first.N),
        *(formats.get(d, "-") for d in DIRECTIONS),
        how,
        line_of(first),
    )
    return LayerRow(first.origin.module, cells, (), calls * times)


def line_of(entry: Entry) -> str:
    """``model.py:42``, where the user wrote it."""
    return entry.origin.source.split(" in ")[0] or "-"


def _flat(entry: Entry) -> dict[str, Any]:
    data = dataclasses.asdict(entry)
    info = data.pop("info")
    return {**info.pop("origin"), **info, **data}
