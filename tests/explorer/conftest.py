"""The page that this folder's tests share, as a file and in a browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import opened
from tests.support.explored import explained


@pytest.fixture(scope="session")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the shared report."""
    path = tmp_path_factory.mktemp("explorer") / "graph.html"
    explained().to_html(path)
    return path


@pytest.fixture
def shown(chromium: Any, page_file: Path) -> Iterator[Any]:
    """The page, ready; at the end it must have logged no error and asked for nothing."""
    with opened(chromium, page_file.as_uri(), viewport={"width": 1280, "height": 800}) as seen:
        seen.page.wait_for_selector("body[data-ready=yes]")
        yield seen.page
        assert (seen.errors, seen.requests) == ([], [])
