"""Tables, bytes and numbers as text."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Sequence

from rich.console import Console, RenderableType
from rich.table import Table

NARROWEST, WIDTH = 60, 150  # columns; the latter is what files have


def human(nbytes: float) -> str:
    """``1536 -> "1.5 KiB"``."""
    for unit in ("B", "KiB", "MiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"


def table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    """Rows under their columns, without lines around them."""
    made = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="")
    for column in columns:
        made.add_column(column, overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def printed(parts: Iterable[RenderableType], *, wrap: bool = False, width: int = WIDTH) -> str:
    """Tables and lines below each other, ``width`` columns wide; ``wrap``: long lines are broken there."""
    console = Console(width=width, no_color=True, highlight=False, markup=False, soft_wrap=False)
    with console.capture() as capture:
        for part in parts:
            console.print(part, soft_wrap=isinstance(part, str) and not wrap)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def terminal_width() -> int:
    """Columns of the terminal, 60 to 150; where there is none, those that files have."""
    return min(max(shutil.get_terminal_size((WIDTH, 24)).columns, NARROWEST), WIDTH)


def wrapped(text: str, width: int, indent: str = "") -> str:
    """Prose in lines of at most ``width`` columns, each after ``indent``; a word that is longer is not broken."""
    return textwrap.fill(
        text, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
