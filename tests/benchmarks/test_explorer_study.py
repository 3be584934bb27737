"""What the study of the explorer measures in a browser, which goals it finds missed, and the page of results of that."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.explorer_section import FILE, explorer
from benchmarks.studies import bench_explorer
from tests.support import browser as browsers
from tests.support.explored import explained

MOVED = {"median": 60.0, "worst": 25.0, "visible": 2100}
ROW = {
    "layers": 12,
    "recipe": "default",
    "bytes": 2_000_000,
    "boxes": 7557,
    "near": [MOVED, MOVED],
    "far": [MOVED, {"median": 40.0, "worst": 15.0, "visible": 2050}],
    "interactive": {"median": 0.61, "worst": 0.8},
    "wall": {"median": 0.9, "worst": 1.2},
    "errors": 0,
    "requests": 0,
}


def changed(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """The row with another value at a place."""
    row = copy.deepcopy(ROW)
    place: Any = row
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return row


def test_a_page_within_its_goals_misses_none() -> None:
    assert bench_explorer.missed(12, ROW) == []
    assert bench_explorer.missed(60, changed(("interactive", "median"), 3.9)) == []


@pytest.mark.parametrize(
    ("path", "value", "name"),
    [
        (("bytes",), 3_000_001, "bytes"),
        (("interactive", "median"), 2.0, "interactive"),
        (("near", 1, "median"), 29.9, "frames"),
        (("far", 0, "median"), 29.9, "frames"),
        (("far", 1, "visible"), 1999, "visible"),
        (("errors",), 1, "errors"),
        (("requests",), 1, "requests"),
    ],
)
def test_each_goal_can_be_missed(path: tuple[Any, ...], value: Any, name: str) -> None:
    assert bench_explorer.missed(12, changed(path, value)) == [name]


def test_a_page_is_opened_and_moved(chromium: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small page: its figures are those of a browser, not of a table."""
    for name, value in (("OPENINGS", 2), ("MOVING_MS", 300), ("VISIBLE", 40)):
        monkeypatch.setattr(bench_explorer, name, value)
    path = tmp_path / "graph.html"
    explained().to_html(path)
    found = bench_explorer.measured(chromium, path)
    assert found["bytes"] == path.stat().st_size
    assert 0 < found["interactive"]["median"] <= found["interactive"]["worst"]
    assert (found["errors"], found["requests"]) == (0, 0)
    for moved in (*found["near"], *found["far"]):
        assert moved["worst"] <= moved["one_in_twenty_below"] <= moved["median"]
        assert moved["frames"] > 1
    assert min(moved["visible"] for moved in found["far"]) >= 40
    assert found["boxes"] > 40


def test_without_a_browser_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(browsers, "installed", lambda: None)
    with pytest.raises(SystemExit, match="no Chromium on the PATH"):
        bench_explorer.main([])
    monkeypatch.setitem(sys.modules, "playwright", None)
    with pytest.raises(SystemExit, match="pip install playwright"):
        bench_explorer.main([])


def test_the_section_says_what_was_missed(tmp_path: Path) -> None:
    found = {"browser": "Chromium 1", "pages": [ROW | {"missed": []}]}
    (tmp_path / FILE).write_text(json.dumps(found))
    text = "\n".join(explorer(tmp_path))
    assert "Each goal of the study is reached." in text and "No page made a request" in text
    row = "| 12, default | 7,557 | 2.00 | 0.61 (0.80) | 0.90 (1.20) | 60 (25) | 40 (15) | 2,050 |"
    assert row in text
    (tmp_path / FILE).write_text(json.dumps(found | {"pages": [ROW | {"missed": ["bytes"], "errors": 1}]}))
    text = "\n".join(explorer(tmp_path))
    assert "**Goals missed: 12, default: bytes.**" in text and "**A page made a request or logged an error.**" in text
