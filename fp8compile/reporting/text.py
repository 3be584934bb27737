"""The report as a readable table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table

from fp8compile._text import human, printed, table
from fp8compile.fx.provenance import Origin
from fp8compile.reporting.entries import Notes


def text_of(
    recipe: str, kinds: Sequence[str], saved_bytes: tuple[int, int], notes: Notes, remarks: Iterable[str]
) -> str:
    """A headline, then a table each of linears, encoded tensors, tensors left as they are and recomputed ones.

    ``kinds`` are those of the graphs; ``saved_bytes`` ours and plain Inductor's.
    """
    lines = (f"remark: {remark}" for remark in remarks)
    return printed([_headline(recipe, kinds, saved_bytes, notes), *_tables(notes), *lines], wrap=True)


def _headline(recipe: str, kinds: Sequence[str], saved_bytes: tuple[int, int], notes: Notes) -> str:
    training = sum(kind == "training" for kind in kinds)
    ours, plain = saved_bytes
    share = f" ({ours / plain:.0%})" if plain else ""
    rewritten = sum(not x.reason for x in notes.linears)
    linears = f"{rewritten} of {len(notes.linears)} products of linears in FP8\n" if notes.linears else ""
    widened = [i for i in notes.islands if not i.left]
    islands = f"{len(widened)} FP32 islands, {sum(i.nodes for i in widened)} nodes\n" if widened else ""
    return (
        f"fp8compile: {training} training and {len(kinds) - training} inference graph(s), {recipe}\n"
        f"kept for the backward: {human(ours)}, plain Inductor {human(plain)}{share}\n"
        f"{linears}{islands}{len(notes.saved)} tensors encoded, {len(notes.skips)} left as they are, "
        f"{len(notes.recomputed)} recomputed instead of kept"
    )


def _tables(notes: Notes) -> Iterable[Table]:
    if notes.linears:
        rows = [
            (
                x.origin.module or "-",
                x.origin.source or "-",
                x.M,
                x.K,
                x.N,
                x.direction,
                x.formats or f"left: {x.reason}",
            )
            for x in notes.linears
        ]
        yield table("linears", ("module", "source", "M", "K", "N", "product", "formats"), rows)
    if notes.islands:
        islands = [
            (
                i.name,
                *_where(i.origin),
                str(i.nodes),
                human(i.bytes_added),
                i.reason,
                f"left: {i.left}" if i.left else f"{i.products} products, {', '.join(i.members)}",
            )
            for i in notes.islands
        ]
        columns = ("first", "op", "module", "source", "nodes", "larger by", "why", "members")
        yield table("FP32 islands", columns, islands)
    if notes.saved:
        rows = [
            (
                s.name,
                *_where(s.origin),
                f"{s.dtype}{s.shape}",
                f"{human(s.bytes_before)} -> {human(s.bytes_after)}",
                s.codec,
            )
            for s in notes.saved
        ]
        yield table("encoded", ("tensor", "op", "module", "source", "shape", "bytes", "codec"), rows)
    if notes.skips:
        rows = [(s.name, *_where(s.origin), f"{s.dtype}{s.shape}", human(s.bytes), s.reason) for s in notes.skips]
        yield table("left as they are", ("tensor", "op", "module", "source", "shape", "bytes", "reason"), rows)
    if notes.recomputed:
        rows = [
            (r.name, *_where(r.origin), f"{r.dtype}{r.shape}", human(r.bytes_before), ", ".join(r.sources))
            for r in notes.recomputed
        ]
        yield table("recomputed", ("tensor", "op", "module", "source", "shape", "bytes", "made from"), rows)


def _where(origin: Origin) -> tuple[str, str, str]:
    return origin.op, origin.module or "-", origin.source or "-"
