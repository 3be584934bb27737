"""The page that this folder's tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.explored import explained


@pytest.fixture(scope="session")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the shared report."""
    path = tmp_path_factory.mktemp("explorer") / "graph.html"
    explained().to_html(path)
    return path
