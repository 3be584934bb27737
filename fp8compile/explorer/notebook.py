"""What a notebook shows of a report: its first lines and the bytes as bars; HTML without a script."""

from __future__ import annotations

import html
from collections.abc import Iterator

from fp8compile._text import human
from fp8compile.explorer.content import Bars

STYLE = "border-collapse:collapse;font:13px system-ui,sans-serif"
CELL = "padding:1px 10px 1px 0;text-align:left;white-space:nowrap"
NUMBER = "padding:1px 10px 1px 0;text-align:right;white-space:nowrap"
PLAIN, LESS, MORE, OURS, PART = "#8a94a6", "#2f9e63", "#c2410c", "#2563eb", "#93b4f5"


def summary_html(head: tuple[str, ...], bars: Bars) -> str:
    """A ``<div>``: the lines, then a bar for plain Inductor's bytes, for each change, and for what ours hold."""
    lines = "".join(f"<div>{html.escape(line)}</div>" for line in head)
    rows = "".join(_row(*each, bars.plain or 1) for each in _amounts(bars)) if bars.plain or bars.ours else ""
    table = f'<table style="{STYLE}">{rows}</table>' if rows else ""
    return f'<div style="font:13px system-ui,sans-serif">{lines}{table}</div>'


def _amounts(bars: Bars) -> Iterator[tuple[str, int, int, int, str]]:
    """Label, bytes, from where to where the bar goes, colour."""
    yield "plain Inductor", bars.plain, 0, bars.plain, PLAIN
    at = bars.plain
    for label, nbytes, _ in bars.changes:
        yield label, nbytes, min(at, at + nbytes), max(at, at + nbytes), LESS if nbytes <= 0 else MORE
        at += nbytes
    yield "fp8compile", bars.ours, 0, bars.ours, OURS
    at = 0
    for label, nbytes, _ in bars.parts:
        yield f"\u2003{label}", nbytes, at, at + nbytes, PART
        at += nbytes


def _row(label: str, nbytes: int, start: int, end: int, colour: str, whole: int) -> str:
    left, width = (max(0.0, min(100.0, 100 * value / whole)) for value in (start, end - start))
    sign = "\u2212" if nbytes < 0 else ""
    bar = f'<div style="margin-left:{left:.2f}%;width:{max(width, 0.3):.2f}%;height:12px;background:{colour}"></div>'
    return (
        f'<tr><td style="{CELL}">{html.escape(label)}</td><td style="{NUMBER}">{sign}{human(abs(nbytes))}</td>'
        f'<td style="width:320px">{bar}</td></tr>'
    )
