"""The page of a run: a snapshot that holds the lines, or one that fetches them from the server that it came from."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fp8compile.extras.watching.lines import SCHEMA
from fp8compile.extras.watching.reading import LoggedRun
from fp8compile.pages.files import vendored
from fp8compile.pages.one_file import one_file

ASSETS = Path(__file__).parent / "assets"
SCRIPTS = ("read.js", "text.js", "charts.js", "record.js", "page.js")  # in this order
TAIL = 32 * 2**20  # bytes of a run that a live page reads: some 100,000 steps


def snapshot(title: str, runs: Iterable[LoggedRun]) -> str:
    """A page of these runs as they are now; works offline."""
    held = [{"name": run.name, "text": run.text, "left_out": run.left_out} for run in runs]
    return _page(title, {"live": False, "runs": held})


def live(title: str, milliseconds: int = 1000, tail: int = TAIL) -> str:
    """A page that asks the server it came from for new lines; of a longer run it reads the last ``tail`` bytes."""
    return _page(title, {"live": True, "every": milliseconds, "tail": tail, "runs": []})


def _page(title: str, data: dict[str, Any]) -> str:
    scripts = [vendored("uplot.min.js"), *(_asset(name) for name in SCRIPTS)]
    styles = [vendored("uplot.min.css"), _asset("page.css")]
    data = {"schema": SCHEMA, "title": title, **data}
    return one_file(f"{title}: fp8compile", _asset("body.html"), styles, scripts, data, polls=bool(data["live"]))


def _asset(name: str) -> str:
    return (ASSETS / name).read_text()
