"""A page holds all that it needs, runs nothing that its data says, and asks the network for nothing."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from fp8compile.pages.files import VENDOR, libraries, vendored
from fp8compile.pages.one_file import json_in_html, one_file
from tests.support.browser import opened

NASTY = {
    "</script><script>window.bad=1</script>": ["<img src=x onerror=window.bad=1>", "a & b", "\u2028", 'q"\\u003c']
}
READS = "document.body.dataset.read = document.getElementById('data').textContent;"


def test_data_is_read_as_it_was_written_and_never_run(chromium: Any, tmp_path: Path) -> None:
    where = tmp_path / "page.html"
    where.write_text(one_file("</title><script>window.bad=1</script>", "<main></main>", [], [READS], NASTY))
    with opened(chromium, where.as_uri()) as seen:
        assert json.loads(seen.page.evaluate("document.body.dataset.read")) == NASTY
        assert seen.page.evaluate("window.bad") is None
        assert seen.page.title() == "</title><script>window.bad=1</script>"
        assert (seen.errors, seen.requests) == ([], [])


def test_a_script_that_the_file_does_not_hold_and_any_request_are_refused(chromium: Any, tmp_path: Path) -> None:
    where = tmp_path / "page.html"
    asks = "fetch('http://127.0.0.1:9/x').catch(() => { document.body.dataset.asked = 'refused' });"
    where.write_text(one_file("t", "<b onclick='window.bad=1' id=b>b</b>", [], [asks], {}))
    with opened(chromium, where.as_uri()) as seen:
        seen.page.click("#b")
        seen.page.wait_for_selector("[data-asked=refused]", state="attached")
        assert seen.page.evaluate("window.bad") is None
        assert len(seen.errors) >= 2  # the policy says so in the console: for the handler, and for the request
        assert seen.requests == []


def test_a_vendored_script_runs_from_within_the_file(chromium: Any, tmp_path: Path) -> None:
    where = tmp_path / "page.html"
    where.write_text(one_file("t", "", [vendored("uplot.min.css")], [vendored("uplot.min.js")], {}))
    with opened(chromium, where.as_uri()) as seen:
        assert seen.page.evaluate("typeof uPlot") == "function"
        assert (seen.errors, seen.requests) == ([], [])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_json_has_not_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_in_html({"loss": value})


@pytest.mark.parametrize("text", ["a</SCRIPT >b", "<!-- x"])
def test_a_script_that_would_end_its_element_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="would end it early"):
        one_file("t", "", [], [text], {})


def test_every_vendored_file_is_listed_with_its_hash_and_its_licence() -> None:
    listed = {name: digest for library in libraries() for name, digest in library["files"].items()}
    there = {path.name for path in VENDOR.iterdir()} - {"VENDORED.json"}
    assert set(listed) == there
    assert all(hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == digest for name, digest in listed.items())
    assert all(any(name.endswith(".LICENSE") for name in library["files"]) for library in libraries())


def test_a_file_that_is_not_listed_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"jquery\.js is not listed"):
        vendored("jquery.js")
