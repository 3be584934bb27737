"""The browser and the page that this folder's tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import browser
from tests.support.explored import explained


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    with browser() as running:
        yield running


@pytest.fixture(scope="session")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the shared report."""
    path = tmp_path_factory.mktemp("explorer") / "graph.html"
    explained().to_html(path)
    return path
