"""The exceptions of the zoo, taken apart: the arms of one model, which rows are due, and what the page says of them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.harness.measured_sections import load
from benchmarks.harness.results import FOLDER
from benchmarks.studies.measuring import call
from benchmarks.zoo import apart, page
from benchmarks.zoo.causes import CAUSES, MENDS
from benchmarks.zoo.registry import MODULES, installed, models
from fp8compile.numerics.gradient_quality import BAR

ZOO = models(tuple(MODULES))
WEIGHT = "0.weight"
STORAGE = {"linears": "off", "linears.emulate": False}


def row(mean: float, **db: Any) -> dict[str, Any]:
    """Of a model whose gap is ``mean``, and that of preset "off" 0."""
    gap = {"ours": {"mean": mean}, "off": {"mean": 0.0, "each": [0.0]}}
    ours = {"worst": 12.0, "worst_parameter": WEIGHT, "count_below_bar": 0, "below_bar": {}, **db}
    return {"errors": {}, "gradients": 4, "zero": 0, "undetermined": 0, "gap": gap, "db": {"ours": ours}, "steps": 2}


# --------------------------------------------------------------------------------------------------- one model


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two batches and two seeds, and a change to the recipe that makes ours what storage is by itself."""
    monkeypatch.setattr(apart, "BATCHES", range(2))
    monkeypatch.setattr(apart, "SEEDS", 2)
    monkeypatch.setattr(apart, "MENDS", {"vae": STORAGE})


@pytest.mark.usefixtures("small")
def test_each_part_is_measured_by_itself() -> None:
    """Storage leaves the forward alone, linears do not; without linears ours is storage, to the bit."""
    model = ZOO["vae"]
    name = next(name for name, _ in model.case(0).model.named_parameters())
    found = apart.apart(model, row(0.02, worst_parameter=name))
    json.dumps(found)
    assert list(found["parameters"]) == [name] and found["mend"] == {
        key: str(value) for key, value in STORAGE.items()
    }
    db, gaps = found["parameters"][name]["db"], found["gap"]
    assert list(db) == ["twin", "off", "storage", "linears", "ours", "mended"] and list(gaps) == list(db)[1:]
    assert db["mended"] == db["storage"] and gaps["mended"] == gaps["storage"]
    assert all(len(each) == 2 for each in db.values()) and len(gaps["ours"]["each"]) == 2
    assert all(
        ours < min(off, storage) for ours, off, storage in zip(db["ours"], db["off"], db["storage"], strict=True)
    )


@pytest.mark.usefixtures("small")
def test_no_run_is_trained_for_a_gradient() -> None:
    name = next(name for name, _ in ZOO["vae"].case(0).model.named_parameters())
    found = apart.apart(ZOO["vae"], row(0.001, below_bar={name: 9.0}))
    assert found["gap"] == {} and list(found["parameters"]) == [name]


def test_the_size_of_a_gradient_is_beside_the_one_in_the_middle() -> None:
    exact = {"a": torch.full((3,), 0.01), "b": torch.full((5,), 2.0), "c": torch.tensor([7.0])}
    assert apart.size("a", exact) == pytest.approx(0.005) and apart.size("b", exact) == 1.0


def test_gaps_have_the_error_of_their_mean() -> None:
    found = apart.gaps({"twin": [[2.0], [4.0]], "ours": [[2.2], [4.0]]})
    assert found["ours"]["each"] == pytest.approx([0.1, 0.0])
    assert (found["ours"]["mean"], found["ours"]["error"]) == pytest.approx((0.05, 0.05))


# ------------------------------------------------------------------------------------------- the results file


def test_exceptions_are_due_until_they_are_taken_apart() -> None:
    rows = {
        "sound": row(0.0),
        "far": row(0.02),
        "done": row(0.02) | {"apart": {}},
        "crash": {"errors": {"ours": {"text": "it"}}},
    }

    def due(*only: str, again: bool = False) -> list[str]:
        return apart.due(rows, argparse.Namespace(only=list(only), again=again))

    assert due() == ["far"] and due(again=True) == ["far", "done"] and due("don", again=True) == ["done"]


def test_figures_are_added_to_their_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "zoo.json"
    path.write_text(json.dumps({"threads": 1, "rows": {"vae": row(0.02), "gan": row(0.0)}}))
    monkeypatch.setattr(
        apart, "alone", lambda model, arguments, measure: {"errors": {"process": {}}, "of": model.name}
    )
    assert apart.main(["--json", str(path)]) == 1, "what it found is that the process ended"
    rows = json.loads(path.read_text())["rows"]
    assert rows["vae"]["apart"]["of"] == "vae" and "commit" in rows["vae"]["apart"]["measured"]
    assert "apart" not in rows["gan"]


def test_every_exception_is_taken_apart_on_what_it_was_found_on() -> None:
    """The first batch of ours is the verdict's: the same figure, but for another build's rounding."""
    rows = page.of_zoo(load(FOLDER, page.RESULTS), "")
    found = {name: each for name, each in rows.items() if page.findings(each)}
    assert [name for name, each in found.items() if each["apart"]["errors"]] == []
    for name, each in found.items():
        for parameter, db in each["db"]["ours"]["below_bar"].items():
            assert each["apart"]["parameters"][parameter]["db"]["ours"][0] == pytest.approx(db, abs=0.1), name
        assert bool(each["apart"]["gap"]) is not page.is_close(each), name


def test_what_mends_a_model_is_measured_and_does() -> None:
    """Each brings the worst gradient of its model above the bar, or the loss close."""
    rows = page.of_zoo(load(FOLDER, page.RESULTS), "")
    assert set(MENDS) <= set(CAUSES)
    for name in MENDS:
        worst = rows[name]["db"]["ours"]["worst_parameter"]
        db = rows[name]["apart"]["parameters"][worst]["db"]
        assert db["mended"][0] > db["ours"][0], name


def test_the_causes_count_the_batches_on_which_bf16_is_below_the_bar() -> None:
    rows = page.of_zoo(load(FOLDER, page.RESULTS), "")
    told = {name: cause for name, cause in CAUSES.items() if "below it on " in cause and "BF16 itself" in cause}
    at_the_bar = {
        "deberta_v2",
        *(f"timm_{name}" for name in ("resnext", "seresnet", "densenet", "mobilenetv3", "ghostnet")),
    }
    assert set(told) == at_the_bar
    for name, cause in told.items():
        db = rows[name]["apart"]["parameters"][rows[name]["db"]["ours"]["worst_parameter"]]["db"]["twin"]
        below = sum(each < BAR for each in db)
        assert f"below it on {('no', 'one', 'two', 'three', 'four', 'five')[below]} of five batches" in cause, name


# --------------------------------------------------------------------------------------------------- the page


def test_the_page_shows_the_parts_of_the_worst() -> None:
    db = {
        "twin": [20.0, 22.0],
        "off": [19.0, 20.0],
        "storage": [7.25, 9.75],
        "linears": [12.0, 13.0],
        "ours": [7.0, 9.0],
    }
    found = row(0.0, worst=7.0, count_below_bar=1, below_bar={WEIGHT: 7.0})
    assert set(page.parts(found)) == {"-"}
    found["apart"] = {"parameters": {WEIGHT: {"db": db, "size": [0.002, 0.004]}}, "mend": {}, "gap": {}}
    assert page.parts(found) == ("3e-03", "20.0 (21.0)", "19.0 (19.5)", "7.2 (8.5)", "12.0 (12.5)", "-")
    db["mended"], found["apart"]["mend"] = [15.0, 16.0], {"saved.attention": "False"}
    assert page.parts(found)[-1] == "15.0 (15.5), `saved.attention=False`"


def test_the_page_shows_the_gaps_of_the_parts() -> None:
    each = {arm: {"mean": 0.02, "error": 0.01} for arm in ("off", "storage", "linears", "ours")}
    assert page.losses_apart({"sound": row(0.0)}) == []
    shown = page.losses_apart({"it": row(0.02) | {"apart": {"gap": each}}})
    assert shown[-1] == "| `it` | +2.00 % ± 1.00 % | +2.00 % ± 1.00 % | +2.00 % ± 1.00 % | +2.00 % ± 1.00 % | - |"


# ----------------------------------------------------------------------------------------------- what it rests on


@pytest.mark.parametrize(
    "family", ["plain", *(pytest.param(f, marks=pytest.mark.sweep) for f in MODULES if f != "plain")]
)
def test_no_model_draws_at_random(family: str) -> None:
    """A model that does differs from itself in float64: its batch is to hold what it draws."""
    from benchmarks.harness.workarounds import mend_torchvision

    if family not in installed():
        pytest.skip(f"{family} is not installed")
    mend_torchvision()
    drawing = []
    for name, model in models((family,)).items():
        case, batch = model.case(0), model.batch(0)
        before = torch.get_rng_state()
        call(case.model, batch, "fp32")  # not every CPU has an LSTM in BF16
        drawing += [] if torch.get_rng_state().equal(before) else [name]
    assert drawing == []
