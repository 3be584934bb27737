"""The zoo: what is in it, what its page says of the results, and some of its models from end to end."""

from __future__ import annotations

import collections
import copy
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from benchmarks.harness.measured_sections import load
from benchmarks.harness.results import FOLDER
from benchmarks.studies import measuring
from benchmarks.studies.rows import agree
from benchmarks.zoo import page, run
from benchmarks.zoo.causes import CAUSES
from benchmarks.zoo.measured import gap, row_of
from benchmarks.zoo.registry import MODULES, SUBSET, ZooModel, models

ZOO = models(tuple(MODULES))  # a model's package is imported when it is built


def rows() -> dict[str, Any]:
    return page.of_zoo(load(FOLDER, page.RESULTS), "")


# ------------------------------------------------------------------------------------------------ the registry


def test_at_least_ninety_models_of_four_families() -> None:
    """Names are unique: ``models`` raises otherwise."""
    families = collections.Counter(model.family for model in ZOO.values())
    assert len(ZOO) >= 90
    assert families["transformers"] >= 40 and families["timm"] >= 20 and families["plain"] >= 30
    assert {"diffusers_unet", "diffusers_dit", "diffusers_vae"} <= set(ZOO)


def test_other_images_than_the_page_has_are_refused_before_the_first_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run, "digits_source", lambda: "class-dependent patterns")
    monkeypatch.setattr(run, "measured", lambda zoo, arguments: {"rows": {}})
    line = ["--json", str(tmp_path / "rows.json"), "--only", "convnet"]
    with pytest.raises(SystemExit, match="pip install scikit-learn"):
        run.main(line)
    assert run.main([*line, "--made-up-images"]) == 0


def test_two_models_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.zoo import plain_tables

    monkeypatch.setattr(plain_tables, "MODELS", (*plain_tables.MODELS, ZOO["gan"]))
    with pytest.raises(ValueError, match=r"two models of the zoo are called 'gan'. Rename one in plain_tables.py"):
        models(("plain",))


def test_the_subset_needs_torch_alone() -> None:
    assert {ZOO[name].family for name in SUBSET} == {"plain"}


@pytest.mark.parametrize("name", ["lstm_cell", "gnn", "nerf", "whisper", "timm_vit"])
def test_a_batch_is_the_same_for_every_call(name: str) -> None:
    one, again, other = (ZOO[name].batch(number).tensors() for number in (3, 3, 4))
    assert all(a.equal(b) for a, b in zip(one, again, strict=True))
    assert not all(a.equal(b) for a, b in zip(one, other, strict=True))


# ---------------------------------------------------------------------------------------- models, end to end


@pytest.mark.parametrize("name", ["lora", "gan"])
def test_a_model_from_end_to_end(name: str) -> None:
    row = row_of(ZOO[name], seeds=1, steps=2)
    json.dumps(row)
    assert row["errors"] == {} and row["reference"] == "torch.float64"
    assert row["graphs"] == 1 and 0 < row["products_fp8"] < row["products_told"]
    assert row["saved_after"] < row["saved_before"] and agree(row["saved_after"], row["saved_measured"])
    assert row["left"] and sum(row["left"].values()) == row["products_told"] - row["products_fp8"]
    assert row["db"]["ours"]["worst"] < row["db"]["off"]["worst"], "FP8 is rougher than BF16"
    twin, off, ours = (row["losses"][arm][0] for arm in ("twin", "off", "ours"))
    assert len(ours) == 2 and ours != off and all(map(math.isfinite, ours))
    assert row["gap"]["ours"]["mean"] == pytest.approx(gap(ours, twin), abs=1e-4)


@pytest.mark.sweep
@pytest.mark.parametrize("name", [name for name in SUBSET if name not in ("lora", "gan")])
def test_the_subset(name: str) -> None:
    row = row_of(ZOO[name], seeds=1, steps=2)
    assert row["errors"] == {} and agree(row["saved_after"], row["saved_measured"])


def test_what_an_arm_raises_is_in_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other arms are measured all the same."""
    from benchmarks.zoo import measured

    plain = measured.ways("eager")
    monkeypatch.setattr(measured, "ways", lambda codegen: {arm: plain[arm] for arm in ("twin", "ours")})
    monkeypatch.setattr(
        measured,
        "build",
        lambda case, way, *more: measuring.build(case, way, *more) if way.name == "eager" else 1 // 0,
    )
    row = row_of(ZOO["realnvp"], seeds=1, steps=1)
    assert row["errors"]["ours"]["type"] == "ZeroDivisionError" and list(row["losses"]) == ["twin"]
    assert page.findings(row) == ["ours: ZeroDivisionError: integer division or modulo by zero"]


# ------------------------------------------------------------------------------------------------- the runner


def arguments(tmp_path: Path, *more: str) -> Any:
    return run.parse(["--json", str(tmp_path / "zoo.json"), "--limit", "60", *more])


def model_that(what: Callable[[], Any]) -> ZooModel:
    return ZooModel("it", "plain", what, ZOO["gan"].batch)


def refuse() -> nn.Module:
    raise RuntimeError("no such layer")


def test_a_model_that_cannot_be_built_gets_a_row(tmp_path: Path) -> None:
    row = run.alone(model_that(refuse), arguments(tmp_path))
    assert row["errors"]["model"]["text"] == "RuntimeError: no such layer"


def test_a_process_that_dies_gets_a_row(tmp_path: Path) -> None:
    row = run.alone(model_that(lambda: os._exit(3)), arguments(tmp_path))
    assert row["errors"]["process"]["text"] == "its process ended with 3"


def test_a_process_over_its_limit_is_ended(tmp_path: Path) -> None:
    started = time.monotonic()
    row = run.alone(model_that(lambda: time.sleep(100)), arguments(tmp_path, "--limit", "1"))
    assert row["errors"]["process"]["text"] == "over its limit of 1 s"
    assert time.monotonic() - started < 50


def test_rows_that_are_good_still_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def alone(model: ZooModel, arguments: Any) -> dict[str, Any]:
        asked.append(model.name)
        return {"family": model.family, "errors": {"model": {"type": "", "text": "not run", "where": []}}}

    monkeypatch.setattr(run, "alone", alone)
    monkeypatch.setenv("BENCHMARKED_COMMIT", "one")
    two = [ZOO["gan"], ZOO["vae"]]
    run.measured(two, arguments(tmp_path))
    run.measured([*two, ZOO["unet"]], arguments(tmp_path))
    assert asked == ["gan", "vae", "unet"]
    run.measured(two, arguments(tmp_path, "--again"))
    monkeypatch.setenv("BENCHMARKED_COMMIT", "two")
    run.measured([ZOO["unet"]], arguments(tmp_path))
    assert asked == ["gan", "vae", "unet", "gan", "vae", "unet"]
    run.measured([ZOO["unet"]], arguments(tmp_path, "--codegen", "inductor"))
    written = json.loads((tmp_path / "zoo.json").read_text())
    assert list(written["rows"]) == ["gan", "vae", "unet", "unet/inductor"]
    assert written["rows"]["unet"]["measured"]["commit"] == "two"


def test_words_choose_models() -> None:
    assert [model.name for model in run.chosen(ZOO, ["nn_lstm"], subset=False)] == ["nn_lstm"]
    assert {model.family for model in run.chosen(ZOO, ["timm"], subset=False)} == {"timm"}
    assert {model.name for model in run.chosen(ZOO, ["qwen"], subset=False)} >= {"qwen2", "qwen3_moe"}
    assert [model.name for model in run.chosen(ZOO, [], subset=True)] == [name for name in ZOO if name in SUBSET]
    with pytest.raises(ValueError, match=r"no model of the zoo has 'lama4' in its name or family\. Fix: --list"):
        run.chosen(ZOO, ["lama4"], subset=False)


# --------------------------------------------------------------------------------------------------- the page


def test_the_page_is_made_of_the_results() -> None:
    assert page.PAGE.read_text() == page.page(), "run python benchmarks/zoo/page.py"


def test_check_sees_another_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert page.main(["--check"]) == 0
    monkeypatch.setattr(page, "PAGE", tmp_path / "zoo.md")
    page.PAGE.write_text("# The zoo\n")
    assert page.main(["--check"]) == 1


def test_every_exception_has_a_cause_and_every_cause_an_exception() -> None:
    assert {name for name, row in rows().items() if page.findings(row)} == set(CAUSES)


def test_what_the_zoo_is_to_show() -> None:
    """At least 90 models, none of which raises, 95 % of them close to their twins; reports that agree with autograd."""
    found = rows()
    assert len(found) >= 90
    assert [name for name, row in found.items() if row["errors"]] == []
    assert sum(map(page.is_close, found.values())) >= 0.95 * len(found)


SOUND: dict[str, Any] = {
    "errors": {},
    "gradients": 8,
    "zero": 1,
    "undetermined": 2,
    "gap": {"ours": {"mean": 0.02, "each": [0.01, 0.03]}, "off": {"mean": 0.0, "each": [0.03, -0.03]}},
    "db": {"ours": {"worst": 12.0, "median": 20.0, "worst_parameter": "a", "count_below_bar": 0}},
}


def test_what_makes_an_exception() -> None:
    assert page.findings(SOUND) == [], "2 % is within the spread of preset off, 3 %"
    row = copy.deepcopy(SOUND)
    row["gap"]["off"]["each"] = [0.015, -0.001]
    assert page.findings(row) == ["gap +2.00%"]
    row["gap"]["ours"]["mean"] = -0.0099
    assert page.findings(row) == []
    row["db"]["ours"] |= {"worst": 7.25, "count_below_bar": 2}
    assert page.findings(row) == ["2 of 5 gradients below 10 dB, worst `a` 7.2 dB"]


def test_reasons_are_counted_without_what_is_one_models_own() -> None:
    found = [
        {"left": {"N=10 is not a multiple of 16": 3, "K=9 is not a multiple of 16": 1}},
        {"left": {"N=12 is not a multiple of 16": 2}},
    ]
    assert page.reasons(found)[2:] == [
        "| N is not a multiple of 16 | 5 | 2 |",
        "| K is not a multiple of 16 | 1 | 1 |",
    ]
