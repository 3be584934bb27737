"""The browser that this folder's tests share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.browser import browser


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    with browser() as running:
        yield running
