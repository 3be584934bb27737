"""How wide to print: as wide as the terminal; where the output is a file or a pipe, as wide as it comes, for grep."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap


def columns() -> int | None:
    """Those of the terminal, or of the variable COLUMNS; None: the output is no terminal."""
    if "COLUMNS" in os.environ or sys.stdout.isatty():
        return shutil.get_terminal_size().columns
    return None


def fitted(text: str) -> str:
    """The text with its long lines broken at spaces, what follows indented by two columns more than the line."""
    width = columns()
    return text if width is None else "\n".join(_broken(line, width) for line in text.splitlines())


def _broken(line: str, width: int) -> str:
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.fill(line, width, subsequent_indent=indent, break_on_hyphens=False)
