"""A headless Chromium for tests of pages: one per process; what a page logged and what it asked the network for are kept.

Where there is no Chromium the tests are skipped; in CI (``CI=true``) they fail, since a skip there would go unseen.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

FLAGS = (
    "--no-sandbox",  # a container's root has none
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
NAMES = ("chromium", "chromium-browser", "google-chrome")
MISSING = "no Chromium on the PATH (Debian: apt-get install chromium)"


@dataclass
class Seen:
    """A page of the browser, what it logged as an error, and every address that it asked for beyond its own file."""

    page: Any
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


def installed() -> str | None:
    """The path of the Chromium on the PATH."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextlib.contextmanager
def launched(where: str) -> Iterator[Any]:
    """Playwright's handle of a running Chromium, headless."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=where, args=list(FLAGS))
        yield running
        running.close()


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """As ``launched``; a test is skipped, or fails in CI, where there is no Chromium."""
    where = installed()
    if where is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(MISSING)
    with launched(where) as running:
        yield running


@contextlib.contextmanager
def opened(running: Any, address: str, **options: Any) -> Iterator[Seen]:
    """A page of its own at an address (``file:`` or loopback); ``options`` as ``browser.new_page`` has them."""
    page = running.new_page(**options)
    seen = Seen(page)
    page.on("pageerror", lambda error: seen.errors.append(str(error)))
    page.on("console", lambda said: seen.errors.append(said.text) if said.type == "error" else None)
    page.on("request", lambda asked: seen.requests.append(asked.url) if asked.url != address else None)
    page.goto(address)
    yield seen
    page.close()
