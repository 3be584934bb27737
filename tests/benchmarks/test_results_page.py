"""docs/results.md is what its script makes of the results files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import results_page
from benchmarks.harness.measured_sections import gap, source, table
from benchmarks.harness.results import FOLDER


def test_the_page_is_made_of_the_results() -> None:
    assert results_page.PAGE.read_text() == results_page.page(), "run python benchmarks/results_page.py"


def test_every_results_file_is_on_the_page() -> None:
    """A GPU's files come by way of readme_tables."""
    text = results_page.page()
    files = {path.name for path in FOLDER.glob("*.json") if "-tiny-" not in path.name}
    assert files == set(re.findall(r"\.\./benchmarks/results/([\w.-]+\.json)", text))


def test_check_sees_another_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert results_page.main(["--check"]) == 0
    monkeypatch.setattr(results_page, "PAGE", tmp_path / "results.md")
    results_page.PAGE.write_text("# Results\n")
    assert results_page.main(["--check"]) == 1


def test_figures_as_text() -> None:
    assert gap(0.00116, 0.0013) == "+0.12% ± 0.13%"
    assert gap(-0.0023, None) == "-0.23%"
    assert table(("a", "b"), [("x", "5% ± 1%")])[-1] == "| x | 5 % ± 1 % |"
    assert source("f.json") == "[`f.json`](../benchmarks/results/f.json)."
    assert source("f.json", {"device": "CPU", "threads": 2}).endswith(": CPU, 2 threads.")
