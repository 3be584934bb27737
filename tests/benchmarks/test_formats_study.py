"""The table of formats: it has every format of the recipe, and its bytes, gaps and rows are those of what it names."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8compile
from benchmarks.harness import formats_section
from benchmarks.studies import bench_format_training, bench_formats
from benchmarks.studies.formats import CODECS, LINEARS, PLAIN, PUBLISHED, ROWS, SAVED, bytes_per_element
from benchmarks.studies.models import llama
from fp8compile import Recipe
from fp8compile.recipe.validation import CHOICES

torch.set_num_threads(1)


def test_every_format_of_the_recipe_has_a_row() -> None:
    recipes = {name: Recipe.from_options(options) for name, options in ROWS.items()}
    assert {recipes[name].saved.format for name in SAVED} == set(CHOICES["saved.format"]) - {"off", "exact"}
    assert {recipes[name].linears.mode for name in LINEARS} == set(CHOICES["linears.mode"]) - {"off", "auto"}
    assert all(recipes[name].linears.mode == "off" for name in SAVED)
    assert not any(recipes[name].stores_saved for name in LINEARS)
    assert (
        CODECS.keys() == ROWS.keys() and PUBLISHED.keys() <= ROWS.keys() and len(set(recipes.values())) == len(ROWS)
    )


def test_bytes_are_those_of_codes_and_scales() -> None:
    found = bytes_per_element()
    assert found["saved auto"] == found["saved e4m3"] == 1 + 2 / 128
    assert [found[f"saved {bits}bit"] for bits in (6, 5, 4, 3, 2)] == [b / 8 + 4 / 128 for b in (6, 5, 4, 3, 2)]
    assert found["linears mxfp8, e4m3"] == 1 + 1 / 32
    assert found["linears int8"] == 1 + 4 / 1024


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_in_the_codec_that_it_names(name: str) -> None:
    """Of a tiny Llama, whose attention keeps its 8 bits; linears of FP8 have the formats that the recipe says."""
    case = llama(0, tiny=True)
    batch = case.batch(0)
    report = fp8compile.explain(case.model, batch.args, batch.kwargs or {}, recipe=Recipe.from_options(ROWS[name]))
    if name in SAVED:
        assert CODECS[name].name in {saved.codec for saved in report.saved} and not report.linears
    else:
        told = {linear.formats for linear in report.linears}
        kind = CODECS[name].name.split()[0]
        assert told and all(kind in formats for formats in told), told
        assert all(saved.is_operand for saved in report.saved), "codes of operands alone are kept"


def test_a_gap_is_that_of_the_same_seed_and_its_interval_students() -> None:
    plain = {str(seed): {"validation_loss": 2.0} for seed in range(5)}
    ours = {str(seed): {"validation_loss": 2.0 + 0.02 * seed} for seed in range(5)}
    found = bench_format_training.summary({PLAIN: plain, "saved 4bit": ours})["saved 4bit"]
    error = 0.01 * math.sqrt(2.5 / 5)  # gaps are 0 ... 4 %: a variance of 2.5
    assert found["gap"] == pytest.approx(0.02) and found["error"] == pytest.approx(error) and found["seeds"] == 5
    assert found["half_95"] == pytest.approx(2.776 * error)
    assert PLAIN not in bench_format_training.summary({PLAIN: plain})


def test_students_quantiles() -> None:
    """Twice the tail of Student's density beyond them is 5 %, summed over a fine grid."""
    for seeds, quantile in bench_format_training.T_95.items():
        n = seeds - 1
        t = torch.linspace(0, quantile, 200_001, dtype=torch.float64)
        density = (1 + t * t / n) ** (-(n + 1) / 2)
        constant = math.gamma((n + 1) / 2) / (math.sqrt(n * math.pi) * math.gamma(n / 2))
        inside = 2 * constant * float(torch.trapezoid(density, t))
        assert inside == pytest.approx(0.95, abs=1e-4)


def test_what_the_file_has_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells that are there stay as they are, those that are not are added, and the file is whole after each."""
    path, kept = tmp_path / "formats.json", {name: {"worst_db": 1.0} for name in ROWS}
    path.write_text(json.dumps({"layer": kept}))
    found = bench_formats.main(["--json", str(path), "--parts", "bytes", "layer"])
    assert {name: found["layer"][name] for name in ROWS} == kept and found["layer"][PLAIN]["units"] > 10
    written: dict[str, Any] = json.loads(path.read_text())
    assert written["layer"] == found["layer"] and written["bytes"] == bytes_per_element()


def test_every_row_is_on_the_page() -> None:
    lines = formats_section.formats(bench_formats.ROOT / "benchmarks/results")
    for name in (PLAIN, *ROWS, *formats_section.STATES):
        assert any(line.startswith(f"| {name} |") for line in lines), name


def test_an_arm_trains_and_says_what_it_rewrote(tmp_path: Path) -> None:
    words = ["--quick", "--json", str(tmp_path / "training.json"), "--arms", "plain;saved 4bit;linears int8"]
    found = bench_format_training.main(words)
    assert set(found["runs"]) == {PLAIN, "saved 4bit", "linears int8"} and found["model"]["products"] == "bfloat16"
    stored, multiplied = (found["runs"][arm]["0"] for arm in ("saved 4bit", "linears int8"))
    assert stored["saved"] > 0 == stored["products"] and multiplied["products"] > 0 == multiplied["saved"]
