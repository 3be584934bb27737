"""What a report writes to be looked at: a page, its data, Google's format; and what a notebook shows of it."""

from __future__ import annotations

import os
from pathlib import Path

from fp8compile.explorer.content import PageContent
from fp8compile.explorer.data import explorer_json
from fp8compile.explorer.model_explorer import model_explorer_json
from fp8compile.explorer.notebook import summary_html
from fp8compile.explorer.page import page


class WithPages:
    """The methods of a report that write pages; ``page_content`` is what they show."""

    @property
    def page_content(self) -> PageContent:
        """The report as the explorer's page takes it."""
        raise NotImplementedError

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write the explorer: one file that a browser shows offline, with the graphs, the tables, bytes and memory.

        The graphs are those of ``fp8compile.explain``; without them the page has the tables and the bytes.

        Raises:
            OSError: the file cannot be written.
        """
        Path(path).write_text(page(self.page_content), encoding="utf-8")

    def to_explorer_json(self) -> str:
        """The data of that page; ``"schema"`` says its version, fp8compile/explorer/schema.json describes it."""
        return explorer_json(self.page_content)

    def to_model_explorer(self, path: str | os.PathLike[str]) -> None:
        """Write the graphs after the last pass in the JSON format of Google's Model Explorer.

        Raises:
            ValueError: the report has no graphs: it was not made by ``fp8compile.explain``.
            OSError: the file cannot be written.
        """
        Path(path).write_text(model_explorer_json(self.page_content), encoding="utf-8")

    def _repr_html_(self) -> str:
        """What a notebook shows: the first lines and the waterfall."""
        return summary_html((self.page_content.title, *self.page_content.head), self.page_content.bars)
