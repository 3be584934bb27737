"""The page in one file: the data, our scripts and styles."""

from __future__ import annotations

import html
from pathlib import Path

from fp8compile.explorer.content import PageContent
from fp8compile.explorer.data import explorer_data
from fp8compile.pages.one_file import one_file

ASSETS = Path(__file__).with_name("assets")
STYLES = ("page.css",)
SCRIPTS = (  # in the order in which each needs those before it
    "base.js",
    "data.js",
    "modules.js",
    "layout.js",
    "lines.js",
    "shelves.js",
    "scene.js",
    "view.js",
    "tree.js",
    "panel.js",
    "tables.js",
    "bars.js",
    "timeline.js",
    "passes.js",
    "search.js",
    "main.js",
)


def page(content: PageContent) -> str:
    """The text of the page.

    Raises:
        ValueError: a number in the data is not finite.
    """
    body = (ASSETS / "page.html").read_text().replace("{{title}}", html.escape(content.title))
    styles, scripts = ([(ASSETS / name).read_text() for name in names] for names in (STYLES, SCRIPTS))
    return one_file(f"{content.title}: fp8compile", body, styles, scripts, explorer_data(content))
