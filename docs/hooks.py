"""MkDocs: links that leave docs/ lead to the repository; without a ``repo_url`` in mkdocs.yml they are the path alone."""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)+[^)\s]*)\)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Called by MkDocs for each page before it becomes HTML."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def replaced(found: re.Match[str]) -> str:
        text, target = found.groups()
        path = posixpath.normpath(posixpath.join(folder, target.partition("#")[0]))
        if path.startswith("docs/"):
            return found.group()
        if config.repo_url:
            return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{path})"
        return f"{text} (`{path}`)"

    return LINK.sub(replaced, markdown)
