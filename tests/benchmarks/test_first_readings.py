"""README's status and table, and the page's, are made from the facts that benchmarks/results holds, and from nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import readme_tables, results_page
from benchmarks.first import comparisons, facts, pictures, readings, table
from benchmarks.harness.results import FOLDER

HEAD = {"device": "Made-up 100", "versions": {"torch": "9", "triton": "8"}, "commit": "abc"}


def step(job: str, ms: float, what: str = "setup", **row: Any) -> dict[str, Any]:
    return {"job": job, "t": 1.0, "what": what, "ms": ms + 1, "min_ms": ms, **row, **HEAD}


def written(folder: Path, found: list[dict[str, Any]], name: str = "made-up-100-first-2026-01-02.jsonl") -> None:
    for fact in found:
        facts.append(folder / name, fact)


def test_readme_says_what_the_lines_say() -> None:
    """Each speed and each size of README's table, found again in the raw lines by another way than the table's."""
    lines = [
        json.loads(line) for path in FOLDER.glob("first-contact-*.jsonl") for line in path.read_text().splitlines()
    ]
    fastest = {(fact["job"], fact["what"]): fact for fact in lines if "min_ms" in fact}
    text = readme_tables.README.read_text()
    for job, name in (("setup-{}-", "ResNet-50"), ("layer-{}-7b", "Llama-2-7B layer")):
        of = [
            next(f for (j, w), f in fastest.items() if j == _job(job, way) and w in ("setup", "layer"))
            for way in ("inductor", "default")
        ]
        assert re.search(rf"{name}, [^:]*: \*\*{of[0]['min_ms'] / of[1]['min_ms']:.2f} ×\*\*", text)
    shown = [float(speed) for speed in re.findall(r": \*\*([\d.]+) ×\*\*", text)]
    faster, slower = sum(speed >= 1 for speed in shown), sum(speed < 1 for speed in shown)
    assert (
        f"of {faster + slower} models and layers, {faster} train faster than in plain Inductor, {slower} slower"
        in text
    )


def test_first_steps_take_as_long_as_readme_says() -> None:
    rows = [row for row in comparisons.timed(readings.readings(FOLDER)[0].found) if row.first]
    plain = {row.model: row.first for row in rows if row.way == comparisons.PLAIN}
    ours = [(row, row.first / plain[row.model]) for row in rows if row.way == comparisons.DEFAULT]  # type: ignore
    alone = [ratio for row, ratio in ours if not row.optimizer]
    said = f"First steps took {min(alone):.1f} to {max(alone):.1f} times as long to compile and run, in a whole step up to"
    assert f"{said} {max(ratio for _, ratio in ours):.0f} times" in readme_tables.README.read_text()


def _job(text: str, way: str) -> str:
    return text.format(way) if text.startswith("layer") else f"setup-resnet50-{way}"


def test_readme_and_the_page_are_what_the_scripts_make() -> None:
    assert readme_tables.main(["--check"]) == 0 and results_page.main(["--check"]) == 0


def test_the_first_readings_name_their_commit_and_every_file_of_theirs() -> None:
    said = json.loads((FOLDER / "first-contact-h200.json").read_text())
    assert {path.name for path in FOLDER.glob("first-contact-h200-*.jsonl")} == set(said["files"])
    found = readings.readings(FOLDER)[0]
    environment = next(fact for fact in found.found if fact["what"] == "environment")
    assert environment["device"] == found.device and environment["torch"] == found.versions["torch"]
    assert found.commit == "34b1c85" and "no line says them" in said["said_by"]


def test_profiles_that_are_known_to_be_wrong_are_not_shown() -> None:
    found = readings.readings(FOLDER)[0]
    train = [row for row in comparisons.timed(found.found) if row.model == "train"]
    assert train and not any(row.profile for row in train)


def test_sides_are_by_the_fastest_step(tmp_path: Path) -> None:
    """ResNet's median would say the contrary: its host was disturbed."""
    found = [step("setup-resnet50-inductor", 20, kept_gib=5.0), step("setup-resnet50-default", 40, kept_gib=2.0)]
    found[0]["ms"] = 90
    written(tmp_path, [*found, step("layer-inductor-7b", 30, "layer"), step("layer-default-7b", 20, "layer")])
    reading = readings.newest(tmp_path)
    assert reading is not None and reading.where == "Made-up 100, torch 9, triton 8, commit abc"
    faster, slower = readings.sides(reading)
    assert len(faster) == 1 and faster[0].startswith("Llama-2-7B layer, 8×2048: **1.50 ×**")
    assert slower == ["ResNet-50, 128 × 224²: **0.50 ×**, keeps 2.00 GiB of 5.00 GiB"]
    assert readings.status(reading).startswith("**Alpha. Measured on one Made-up 100: of 2 models")


def test_toy_sizes_and_cpus_are_no_readings(tmp_path: Path) -> None:
    pair = [step("setup-vit-inductor", 2), step("setup-vit-default", 1)]
    written(tmp_path, [{**fact, "tiny": True} for fact in pair])
    written(tmp_path, pair, "cpu-first-2026-01-02.jsonl")
    assert readings.newest(tmp_path) is None
    assert readme_tables.first_contact(tmp_path) == readme_tables.NOTHING_YET
    assert readme_tables.status(tmp_path) == readme_tables.NO_STATUS


def test_commits_are_not_mixed(tmp_path: Path) -> None:
    """Plain Inductor's step of one commit beside ours of another would be no comparison; each has a reading of its own."""
    other = {**step("setup-vit-default", 1), "commit": "def"}
    written(tmp_path, [step("setup-vit-inductor", 2), other])
    assert [reading.commit for reading in readings.readings(tmp_path)] == ["abc", "def"]
    assert readings.newest(tmp_path) is None


def test_a_readme_without_its_status_is_refused() -> None:
    with pytest.raises(ValueError, match="Fix: put its status back"):
        readme_tables.made(readme_tables.README.read_text().replace("**Alpha.", "**"))


def test_fewer_layers_are_not_shown_as_the_whole_model() -> None:
    found = [step("setup-vit-inductor", 2), step("setup-vit-default-layers2", 1), step("setup-vit-storage-short1", 4)]
    assert [(row.way, row.fastest) for row in comparisons.timed(found)] == [("inductor", 2), ("storage", 4)]


def test_a_table_tells_what_did_not_end_well() -> None:
    found = [
        {"job": "layer-default-7b", "t": 1, "what": "error", "error": "RuntimeError: so and so\nmore", **HEAD},
        {"job": "layer-default-7b", "t": 1, "what": facts.END, "outcome": facts.FAILED, **HEAD},
        {"job": "setup-vit-default", "t": 1, "what": "setup gradients", "error": "ValueError: no", **HEAD},
        {"job": "run", "t": 2, "what": "over", "not_reached": ["kernels"], **HEAD},
    ]
    text = table.document(found)
    assert "- layer-default-7b: failed (RuntimeError: so and so)\n" in text
    assert "- setup-vit-default: setup gradients: ValueError: no" in text and "- not reached: kernels" in text


def test_a_picture_shows_what_the_facts_compare(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert pictures.written([step("setup-vit-inductor", 2)], tmp_path / "none.png") is None
    found = [step("setup-vit-inductor", 2), step("setup-vit-default", 1)]
    path = pictures.written(found, tmp_path / "speeds.png")
    assert path is not None and path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_there_is_no_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures.importlib.util, "find_spec", lambda name: None)
    found = [step("setup-vit-inductor", 2), step("setup-vit-default", 1)]
    assert pictures.written(found, tmp_path / "speeds.png") is None and not list(tmp_path.iterdir())
