"""How wide to print: as wide as the terminal. In a file or a pipe lines are not wrapped, for grep."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap


def columns() -> int | None:
    """Columns of the terminal, or the variable COLUMNS; None where the output is not a terminal."""
    if "COLUMNS" in os.environ or sys.stdout.isatty():
        return shutil.get_terminal_size().columns
    return None


def fitted(text: str) -> str:
    """The text with its long lines wrapped at spaces; continuation lines are indented two columns more."""
    width = columns()
    return text if width is None else "\n".join(_broken(line, width) for line in text.splitlines())


def _broken(line: str, width: int) -> str:
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.fill(line, width, subsequent_indent=indent, break_on_hyphens=False)
