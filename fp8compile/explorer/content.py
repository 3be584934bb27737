"""What a page shows: graphs, tables, and the bytes from plain to ours. The report fills it (reporting/explored.py)."""

from __future__ import annotations

from dataclasses import dataclass, field

from fp8compile.explorer.picture import Picture
from fp8compile.fx.snapshot import PassStep

TEXT, BYTES, NUMBER = "text", "bytes", "number"  # kinds of columns


@dataclass(frozen=True)
class PageRow:
    """A line of a table, about one node of one graph.

    Attributes:
        graph: the number of the graph.
        node: the name of the node; "" for a row that is not about one.
        cells: texts in columns of texts, numbers in the others.
    """

    graph: int
    node: str
    cells: tuple[str | int | float, ...]


@dataclass(frozen=True)
class PageTable:
    """Entries of one kind; the first column is the module.

    ``columns`` are pairs of a title and a kind: ``TEXT``, ``BYTES`` or ``NUMBER``.
    """

    name: str
    title: str
    columns: tuple[tuple[str, str], ...]
    rows: tuple[PageRow, ...]


@dataclass(frozen=True)
class PageGraph:
    """One compiled graph.

    Attributes:
        kind: "training" or "inference".
        runs: how often it ran in a step.
        places: the modules that it serves, where it begins inside the model.
        remarks: what concerns it as a whole.
        steps: each pass with the graph before and after it; () where the compiled code came from a cache.
        picture: what it keeps and when; None where ``steps`` are missing, and of an inference graph.
        peaks: bytes saved and workspace together, ours and plain Inductor's.
    """

    kind: str
    runs: int = 1
    places: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    steps: tuple[PassStep, ...] = ()
    picture: Picture | None = None
    peaks: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Bars:
    """From plain Inductor's bytes to ours: ``(label, bytes, tensors)`` of each change, and of each part of ours."""

    plain: int
    ours: int
    changes: tuple[tuple[str, int, int], ...] = ()
    parts: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True)
class PageFrontier:
    """A memory budget of a graph: points of ``(saved, peak, microseconds)``, which of them was chosen, and its text."""

    graph: int
    text: str
    target: int
    chosen: int
    points: tuple[tuple[int, int, float], ...]


@dataclass(frozen=True)
class PageContent:
    """All of a page.

    Attributes:
        title: of the page.
        head: what was done, in lines.
        graphs: the compiled graphs.
        tables: what was done and what was left, in lists.
        bars: the bytes saved for backward.
        frontiers: of memory budgets.
        modules: the paths of the model's modules.
        by_module: pairs of a module and what was done there, which layers must have in common to be alike.
    """

    title: str
    head: tuple[str, ...]
    graphs: tuple[PageGraph, ...]
    tables: tuple[PageTable, ...]
    bars: Bars
    frontiers: tuple[PageFrontier, ...] = ()
    modules: tuple[str, ...] = ()
    by_module: tuple[tuple[str, str], ...] = field(default=(), repr=False)
