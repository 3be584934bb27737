"""The report as a readable table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table

from fp8compile._text import WIDTH, human, printed, table
from fp8compile.reporting.entries import LINEAR, RECIPE, SAVED, Entry, Island, Notes, Saved, Skip


def text_of(
    recipe: str,
    kinds: Sequence[str],
    saved_bytes: tuple[int, int],
    notes: Notes,
    remarks: Iterable[str],
    width: int = WIDTH,
) -> str:
    """A headline, then a table each of linears, islands, encoded tensors, what was left as it is, and recomputed tensors.

    ``kinds`` are those of the graphs; ``saved_bytes`` ours and plain Inductor's; ``width`` the columns of the text.
    """
    lines = (f"remark: {remark}" for remark in remarks)
    return printed([_headline(recipe, kinds, saved_bytes, notes), *_tables(notes), *lines], wrap=True, width=width)


def _headline(recipe: str, kinds: Sequence[str], saved_bytes: tuple[int, int], notes: Notes) -> str:
    training = sum(kind == "training" for kind in kinds)
    ours, plain = saved_bytes
    share = f" ({ours / plain:.0%})" if plain else ""
    done, left = len(notes.linears), len(notes.skipped(LINEAR))
    linears = f"{done} of {done + left} matmuls of linears in FP8\n" if done + left else ""
    nodes = sum(i.nodes for i in notes.islands)
    islands = f"{len(notes.islands)} FP32 islands, {nodes} nodes\n" if notes.islands else ""
    return (
        f"fp8compile: {training} training and {len(kinds) - training} inference graph(s), {recipe}\n"
        f"saved for backward: {human(ours)}, plain Inductor {human(plain)}{share}\n"
        f"{linears}{islands}{len(notes.saved)} tensors encoded, {len(notes.skipped(SAVED))} left as they are, "
        f"{len(notes.recomputed)} recomputed instead of saved"
    )


def _tables(notes: Notes) -> Iterable[Table]:
    where = ("op", "module", "source")
    tables: tuple[tuple[str, tuple[str, ...], list[tuple[str, ...]]], ...] = (
        (
            "linears",
            ("module", "source", "M", "K", "N", "matmul", "formats"),
            [(*_where(x)[1:], str(x.M), str(x.K), str(x.N), x.direction, x.formats) for x in notes.linears],
        ),
        (
            "FP32 islands",
            ("first", *where, "nodes", "larger by", "why", "members"),
            [(i.name, *_where(i), str(i.nodes), human(i.bytes_added), i.reason, _members(i)) for i in notes.islands],
        ),
        (
            "encoded",
            ("tensor", *where, "shape", "bytes", "codec"),
            [(s.name, *_where(s), str(s.info), _change(s), s.codec) for s in notes.saved],
        ),
        (
            "left as they are",
            ("tensor", "what", *where, "shape", "bytes", "reason"),
            [(s.name, _what(s), *_where(s), _shape(s), human(s.bytes), s.reason) for s in notes.skips],
        ),
        (
            "recomputed",
            ("tensor", *where, "shape", "bytes", "recomputed from"),
            [
                (r.name, *_where(r), str(r.info), human(r.bytes_before), ", ".join(r.sources))
                for r in notes.recomputed
            ],
        ),
    )
    return (table(title, columns, rows) for title, columns, rows in tables if rows)


def _where(entry: Entry) -> tuple[str, str, str]:
    return entry.origin.op, entry.origin.module or "-", entry.origin.source or "-"


def _members(island: Island) -> str:
    return f"{island.matmuls} matmuls, {', '.join(island.members)}"


def _change(saved: Saved) -> str:
    return f"{human(saved.bytes_before)} -> {human(saved.bytes_after)}"


def _what(skip: Skip) -> str:
    return f"{skip.kind}, {skip.direction}" if skip.direction else skip.kind


def _shape(skip: Skip) -> str:
    return "-" if skip.kind == RECIPE else str(skip.info)
