"""The report as a readable table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from fp8compile.reporting.memory import human
from fp8compile.reporting.report import Origin, Report


def text_of(report: Report) -> str:
    """A headline, then a table each of linears, encoded tensors, tensors left as they are and recomputed ones."""
    console = Console(width=150, no_color=True, highlight=False, markup=False)
    with console.capture() as capture:
        console.print(_headline(report))
        for table in _tables(report):
            console.print(table)
        for remark in report.remarks:
            console.print(f"remark: {remark}")
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _headline(report: Report) -> str:
    training = sum(g.kind == "training" for g in report.graphs)
    plain, ours = report.saved_bytes_plain, report.saved_bytes
    share = f" ({ours / plain:.0%})" if plain else ""
    rewritten = sum(not x.reason for x in report.linears)
    linears = f"{rewritten} of {len(report.linears)} products of linears in FP8\n" if report.linears else ""
    widened = [i for i in report.islands if not i.left]
    islands = f"{len(widened)} FP32 islands, {sum(i.nodes for i in widened)} nodes\n" if widened else ""
    return (
        f"fp8compile: {training} training and {len(report.graphs) - training} inference graph(s), {report.recipe}\n"
        f"kept for the backward: {human(ours)}, plain Inductor {human(plain)}{share}\n"
        f"{linears}{islands}{len(report.saved)} tensors encoded, {len(report.skips)} left as they are, "
        f"{len(report.recomputed)} recomputed instead of kept"
    )


def _tables(report: Report) -> Iterable[Table]:
    if report.linears:
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
            for x in report.linears
        ]
        yield _table("linears", ("module", "source", "M", "K", "N", "product", "formats"), rows)
    if report.islands:
        islands = [
            (
                i.name,
                *_where(i.origin),
                str(i.nodes),
                human(i.bytes_added),
                i.reason,
                f"left: {i.left}" if i.left else f"{i.products} products, {', '.join(i.members)}",
            )
            for i in report.islands
        ]
        columns = ("first", "op", "module", "source", "nodes", "larger by", "why", "members")
        yield _table("FP32 islands", columns, islands)
    if report.saved:
        rows = [
            (
                s.name,
                *_where(s.origin),
                f"{s.dtype}{s.shape}",
                f"{human(s.bytes_before)} -> {human(s.bytes_after)}",
                s.codec,
            )
            for s in report.saved
        ]
        yield _table("encoded", ("tensor", "op", "module", "source", "shape", "bytes", "codec"), rows)
    if report.skips:
        rows = [(s.name, *_where(s.origin), f"{s.dtype}{s.shape}", human(s.bytes), s.reason) for s in report.skips]
        yield _table("left as they are", ("tensor", "op", "module", "source", "shape", "bytes", "reason"), rows)
    if report.recomputed:
        rows = [
            (r.name, *_where(r.origin), f"{r.dtype}{r.shape}", human(r.bytes_before), ", ".join(r.sources))
            for r in report.recomputed
        ]
        yield _table("recomputed", ("tensor", "op", "module", "source", "shape", "bytes", "made from"), rows)


def _where(origin: Origin) -> tuple[str, str, str]:
    return origin.op, origin.module or "-", origin.source or "-"


def _table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
