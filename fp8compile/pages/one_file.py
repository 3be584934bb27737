"""One HTML file that holds all it needs: markup, styles, scripts and data. It makes no request, and works offline.

Data is JSON in a ``<script type="application/json">``: the browser reads it as text and never runs it. What could end that
element, or any other, is escaped, so a module called ``</script>`` does nothing. A Content-Security-Policy in the page
forbids every request and every script that the file itself does not hold.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

DATA = "data"  # the id of the element that holds the data
ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def one_file(
    title: str, body: str, styles: Sequence[str], scripts: Sequence[str], data: Any, polls: bool = False
) -> str:
    """The text of a page.

    Args:
        title: what the browser's tab says; any text.
        body: HTML, ours.
        styles: style sheets, ours or vendored.
        scripts: classic scripts, ours or vendored; run in this order once ``body`` and ``data`` are there.
        data: what ``JSON.parse(document.getElementById("data").textContent)`` gives; see ``json_in_html``.
        polls: whether the page may fetch from the place that it came from (a run that goes on); else from nowhere.

    Raises:
        ValueError: ``data`` holds a NaN or an infinity, which JSON has not; a style sheet or a script would end its element.
    """
    _refuse_ends(styles, "style")
    _refuse_ends(scripts, "script")
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(scripts, polls)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{html.escape(title)}</title>",
        *(f"<style>{style}</style>" for style in styles),
        f"</head><body>{body}",
        f'<script type="application/json" id="{DATA}">{json_in_html(data)}</script>',
        *(f"<script>{script}</script>" for script in scripts),
        "</body></html>\n",
    ]
    return "\n".join(parts)


def json_in_html(data: Any) -> str:
    """JSON, compact, that holds no character with a meaning in HTML.

    Raises:
        ValueError: a NaN or an infinity; write None, or a word.
    """
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.translate({ord(each): escape for each, escape in ESCAPES.items()})


def _policy(scripts: Sequence[str], polls: bool) -> str:
    """Only the scripts that are in the file, by their hashes; no request at all, or only to where the page came from."""
    hashes = " ".join(f"'sha256-{_sha256(script)}'" for script in scripts) or "'none'"
    rules: Mapping[str, str] = {
        "default-src": "'none'",
        "script-src": hashes,
        "style-src": "'unsafe-inline'",
        "img-src": "data:",
        "connect-src": "'self'" if polls else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{rule} {what}" for rule, what in rules.items())


def _sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _refuse_ends(texts: Sequence[str], element: str) -> None:
    for text in texts:
        if f"</{element}" in text.lower() or "<!--" in text:
            raise ValueError(
                f"a {element} of {len(text)} characters holds '</{element}' or '<!--', which would end it early"
            )
