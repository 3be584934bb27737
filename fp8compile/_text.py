"""Tables, bytes and numbers as text."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Sequence

from rich.console import Console, RenderableType
from rich.table import Table

NARROWEST, WIDTH = 60, 150  # columns; files are written at WIDTH


def human(nbytes: float) -> str:
    """``1536 -> "1.5 KiB"``."""
    for unit in ("B", "KiB", "MiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"


def table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], whole: bool = False) -> Table:
    """Rows under their columns, without lines around them; ``whole``: no cell is wrapped."""
    made = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="")
    for at, column in enumerate(columns):
        longest = max((len(row[at]) for row in rows), default=0)
        made.add_column(column, overflow="fold", no_wrap=whole, min_width=longest if whole else None)
    for row in rows:
        made.add_row(*row)
    if whole:
        made.min_width = columns_of(columns, rows)
    return made


def columns_of(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """The width of a table whose cells are not wrapped."""
    return sum(max(map(len, of)) + 2 for of in zip(columns, *rows, strict=True)) - 2


def printed(parts: Iterable[RenderableType], *, wrap: bool = False, width: int | None = WIDTH) -> str:
    """Tables and lines below each other, ``width`` columns wide (None: the terminal's); ``wrap``: long lines are broken."""
    console = Console(width=width or terminal_width(), no_color=True, highlight=False, markup=False, soft_wrap=False)
    with console.capture() as capture:
        for part in parts:
            least = getattr(part, "min_width", None) or 0  # what is never broken may be wider than the terminal
            console.print(part, soft_wrap=isinstance(part, str) and not wrap, width=max(console.width, least))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def terminal_width() -> int:
    """Columns of the terminal, or of COLUMNS, 60 to 150; 100 where there is neither."""
    return min(max(shutil.get_terminal_size((100, 24)).columns, NARROWEST), WIDTH)


def wrapped(text: str, width: int, indent: str = "") -> str:
    """Prose in lines of at most ``width`` columns, each after ``indent``; a word that is longer is not broken."""
    return textwrap.fill(
        text, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
