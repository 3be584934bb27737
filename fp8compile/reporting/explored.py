"""A report as the explorer's page shows it: a table of each kind of entry, the bytes, the budgets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from fp8compile.cost.device_rates import RATES
from fp8compile.explorer.content import BYTES, NUMBER, TEXT, Bars, PageContent, PageFrontier, PageRow, PageTable
from fp8compile.numerics.formats import E4M3, E5M2, INT8
from fp8compile.reporting.entries import RECIPE, Notes
from fp8compile.reporting.entry import Entry
from fp8compile.reporting.kernel import Kernel
from fp8compile.reporting.waterfall import Waterfall

Placed = Sequence[tuple[Notes, int]]  # the notes of one graph at each of its places, and how often it ran there
Cells = Callable[[Any, int], tuple[str | int | float, ...]]  # of an entry that counts so many times

NEAR_ZERO = "1/{} of the value; near 0, amax/{:,.0f}"
EVERYWHERE = "amax/{:,.0f}"


def bound_of(codec: str) -> str:
    """The most that rounding to the nearest code changes a value by; amax is the largest magnitude under one scale.

    Half a step of the format's grid (numerics/formats.py). "" for a codec of another format, or of several.
    """
    for form in (E4M3, E5M2, INT8):
        if codec.startswith(form.name):
            step = 2 * form.max / form.smallest
            return NEAR_ZERO.format(round(1 / form.half_ulp), step) if form.is_float else EVERYWHERE.format(step)
    return ""


def _tensor(entry: Entry) -> tuple[str, str]:
    return entry.origin.op, str(entry.info)


_OF_TENSOR = (("operation", TEXT), ("tensor", TEXT))
_KINDS: tuple[tuple[str, str, tuple[tuple[str, str], ...], Cells], ...] = (
    (
        "linears",
        "Matmuls in FP8 or INT8",
        (("matmul", TEXT), ("M", TEXT), ("K", TEXT), ("N", TEXT), ("formats", TEXT)),
        lambda e, n: (e.direction, str(e.M), str(e.K), str(e.N), e.formats),
    ),
    (
        "saved",
        "Saved as codes",
        (*_OF_TENSOR, ("bytes", BYTES), ("as codes", BYTES), ("codec", TEXT), ("error at most", TEXT), ("made by", TEXT)),
        lambda e, n: (
            *_tensor(e), e.bytes_before * n, e.bytes_after * n, e.codec, bound_of(e.codec),
            "an FP8 matmul" if e.is_operand else "for the backward",
        ),
    ),
    (
        "skips",
        "Left as it was",
        (("what", TEXT), *_OF_TENSOR, ("bytes kept", BYTES), ("reason", TEXT)),
        lambda e, n: (
            f"{e.kind} {e.direction}".strip(), e.origin.op, "-" if e.kind == RECIPE else str(e.info), e.bytes * n, e.reason,
        ),
    ),
    (
        "recomputed",
        "Computed again in the backward",
        (*_OF_TENSOR, ("bytes not saved", BYTES), ("chosen by", TEXT)),
        lambda e, n: (
            *_tensor(e), e.bytes_before * n,
            "the memory budget" if e.for_budget else "fp8compile" if e.sources else "the min-cut",
        ),
    ),
    (
        "islands",
        "FP32 islands",
        (*_OF_TENSOR, ("operations", NUMBER), ("matmuls", NUMBER), ("larger by", BYTES), ("reason", TEXT)),
        lambda e, n: (*_tensor(e), e.nodes, e.matmuls, e.bytes_added * n, e.reason),
    ),
    (
        "observed",
        "Observed",
        (*_OF_TENSOR, ("kind", TEXT), ("direction", TEXT)),
        lambda e, n: (*_tensor(e), e.kind, e.direction),
    ),
    (
        "collectives",
        "Exchanges of codes",
        (("operation", TEXT), ("tensor", TEXT), ("ranks", NUMBER), ("sent plain", BYTES), ("sent", BYTES), ("codec", TEXT)),
        lambda e, n: (e.operation, str(e.info), e.ranks, e.sent_plain * n, e.sent * n, e.codec),
    ),
    (
        "chunked",
        "Logits in chunks",
        (*_OF_TENSOR, ("of rows", NUMBER), ("of columns", NUMBER), ("bytes", BYTES), ("a chunk", BYTES), ("form", TEXT)),
        lambda e, n: (*_tensor(e), e.forward, e.backward, e.bytes_before * n, e.bytes_after * n, e.form),
    ),
    (
        "offloaded",
        "Codes on the host",
        (*_OF_TENSOR, ("us each way", NUMBER), ("us waited for", NUMBER), ("bytes", BYTES)),
        lambda e, n: (*_tensor(e), round(e.us), round(e.waits_us), e.bytes * n),
    ),
)  # fmt: skip


def tables_of(graphs: Sequence[Placed]) -> tuple[PageTable, ...]:
    """A table of each kind of which a graph has entries. Bytes are those of a step: of one run, times runs."""
    made = (
        PageTable(
            name, title, (("module", TEXT), *columns, ("source", TEXT), ("runs", NUMBER)), _rows(name, graphs, cells)
        )
        for name, title, columns, cells in _KINDS
    )
    return tuple(table for table in made if table.rows)


def _rows(name: str, graphs: Sequence[Placed], cells: Cells) -> tuple[PageRow, ...]:
    return tuple(
        PageRow(at, entry.name, (entry.origin.module, *cells(entry, times), entry.origin.source, times))
        for at, placed in enumerate(graphs)
        for notes, times in placed
        for entry in getattr(notes, name)
    )


def page_content_of(head: Sequence[str], graphs: Sequence[Any], bars: Bars, modules: Collection[str]) -> PageContent:
    """What the page shows of the reports of ``graphs``; ``head`` is the title and the lines below it."""
    tables = tables_of([graph.placed for graph in graphs])
    kernels = kernel_table([graph.kernels for graph in graphs])
    return PageContent(
        head[0],
        tuple(head[1:]),
        tuple(graph.drawn for graph in graphs),
        (*tables, kernels) if kernels.rows else tables,
        bars,
        frontiers_of([graph.notes for graph in graphs]),
        tuple(sorted(modules)),
        done_by_module(tables),
    )


def kernel_table(graphs: Sequence[Sequence[Kernel]]) -> PageTable:
    """The kernels of all graphs; times by a roofline with rates that are assumed for an H100 (planning/device_rates.py)."""
    return PageTable(
        "kernels",
        "Kernels",
        (
            ("module", TEXT), ("half", TEXT), ("number", NUMBER), ("kind", TEXT), ("operations", TEXT), ("also of", TEXT),
            ("read", BYTES), ("written", BYTES), ("MFLOP", NUMBER), ("FLOP a byte", NUMBER), ("µs, predicted, H100", NUMBER),
            ("source", TEXT),
        ),
        tuple(
            PageRow(at, k.node, (
                k.module, k.half, k.number, k.kind, k.operations, k.others, k.read, k.written, round(k.flops / 1e6, 3),
                round(k.flops / max(k.moved, 1), 2), round(k.microseconds(RATES["h100"]), 3), k.source,
            ))
            for at, kernels in enumerate(graphs)
            for k in kernels
        ),
    )  # fmt: skip


def bars_of(plain: int, ours: int, waterfall: Waterfall) -> Bars:
    """The waterfall as bars."""
    changes, parts = (
        tuple((a.label, a.nbytes, a.tensors) for a in amounts) for amounts in (waterfall.changes, waterfall.parts)
    )
    return Bars(plain, ours, changes, parts)


def frontiers_of(graphs: Sequence[Notes]) -> tuple[PageFrontier, ...]:
    """The frontier of each graph under a memory budget."""
    return tuple(
        PageFrontier(at, str(each), each.target, each.chosen, tuple((p.saved, p.peak, p.us) for p in each.frontier))
        for at, notes in enumerate(graphs)
        for each in notes.budgets
    )


def done_by_module(tables: Iterable[PageTable]) -> tuple[tuple[str, str], ...]:
    """Pairs of a module and a text of what was done there, the same in layers that are alike."""
    return tuple(
        (str(row.cells[0]), " ".join([table.name, *map(str, row.cells[1:-2])]))
        for table in tables
        for row in table.rows
    )
