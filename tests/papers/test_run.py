"""``python -m benchmarks.papers``: every paper ends in a table, JSON and a plot; what is missing is said."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.papers import __main__ as main
from benchmarks.papers import eight_bit, loss_scaling, stochastic_rounding, vit_islands
from benchmarks.papers.papers import PAPERS
from fp8compile.extras.demo import extras

torch.set_num_threads(1)


def reproduced(name: str, folder: Path) -> dict[str, Any]:
    """What a run of two steps from one seed leaves."""
    assert main.main([name, "--out", str(folder), "--seeds", "1", "--steps", "2"]) == 0
    assert (folder / f"{name}.png").stat().st_size > 10_000
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return found


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer settings and arms: the rest is the same."""
    monkeypatch.setattr(eight_bit, "AROUND", (("lr", (1e-2, 3e-2)),))
    monkeypatch.setattr(loss_scaling, "ROUNDING_FACTOR", 1)
    monkeypatch.setattr(vit_islands, "ARMS", ("FP32", "off"))


@pytest.mark.parametrize("name", PAPERS)
def test_every_paper_ends_in_a_table_json_and_a_plot(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = reproduced(name, tmp_path / "new folder")
    said = capsys.readouterr()
    assert said.err.splitlines()  # what is done so far
    for table in found["tables"]:
        assert table["title"] in said.out and table["rows"]
    published = [key for table in found["tables"] for key in table["rows"][0] if "published" in key]
    assert published or found["published_figures_from"]
    assert "set-up: " in said.out and "published figures: " in said.out
    assert found["paper"]["title"] == PAPERS[name].title and (found["seeds"], found["steps"]) == (1, 2)
    assert found["environment"]["torch"] == torch.__version__ and found["seconds"] > 0


def test_the_same_run_has_the_same_figures(tmp_path: Path) -> None:
    first, second = (reproduced("coat", tmp_path / part)["figures"] for part in ("a", "b"))
    assert first == second


def test_without_scikit_learn_the_rest_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> None:
        raise extras.MissingExtra("the images are scikit-learn's digits: pip install scikit-learn")

    monkeypatch.setattr(stochastic_rounding, "load_images", missing)
    found = reproduced("als", tmp_path)
    assert len(found["tables"]) == 1 and set(found["figures"]) == {"loss_scales"}
    assert "Not run: everything on images, since the images are scikit-learn's digits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("caot", "there is no paper 'caot'. Did you mean 'coat'?"),
        ("8bits", "Did you mean '8bit'?"),
        ("coat --seed 1", "unrecognized arguments: --seed 1"),
        ("coat --steps 0", "'0' is not a whole number of at least 1"),
        ("", "the following arguments are required: NAME"),
    ],
)
def test_a_slip_is_named(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main.main(line.split())
    assert exit_.value.code == 2 and message in capsys.readouterr().err


def test_what_is_missing_is_said_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main.main(["coat", "--out", str(tmp_path)]) == 1
    assert "the plot needs matplotlib, not installed here: pip install 'fp8compile[demo]'" in capsys.readouterr().err


def test_a_folder_that_is_a_file_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main.main(["coat", "--out", str(tmp_path / "file")]) == 1
    assert "python -m benchmarks.papers: error: " in capsys.readouterr().err


@pytest.mark.parametrize("name", PAPERS)
def test_papers_are_found(name: str) -> None:
    assert callable(importlib.import_module(PAPERS[name].home).reproduce)
    assert PAPERS[name].seeds >= 1 and PAPERS[name].steps >= 1
