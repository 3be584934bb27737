"""What is made of the benchmarks' results: goals, tables and plots say what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import goals, readme_tables, suite
from benchmarks.harness import plots, results
from benchmarks.harness.markdown import markdown
from benchmarks.studies import parity


def lap(seconds: float) -> dict[str, float]:
    return {"seconds": seconds, "spread": 0.0}


def a_gpus(folder: Path, date: str = "2026-01-02", **head: Any) -> results.Results:
    """A made-up results file; no figure in it was measured."""
    layer = {
        "benchmark": "layer",
        "case": goals.LLAMA3,
        "arms": {
            "ours": {"forward": lap(0.002), "backward": lap(0.004)},
            "inductor": {"forward": lap(0.003), "backward": lap(0.006)},
        },
        "left_out": {"act-quant": "out of memory"},
        "memory": {"ours": {"peak_bytes": 70}, "inductor": {"peak_bytes": 100}},
        "rates": {"copy": 2e12, "bf16": 5e14},
    }
    made = {"device": "made up", "gpu": True, "tiny": False, "versions": {"torch": "9"}, "began": "then", **head}
    found = results.Results(folder / f"made-up-{date}.json", made)
    found.add(layer)
    return found


def test_goals_are_answered_by_rows_alone(tmp_path: Path) -> None:
    assert all("measured" in line or "needs" in line for line in goals.table({})[2:])
    rows = a_gpus(tmp_path).rows
    by_name = {goal.what: goal for goal in goals.GOALS}
    speed = by_name["Llama-3-8B layer, 1 × 8192: speed over compiled BF16"]
    assert speed.measured(rows) == pytest.approx(1.5) and speed.reached(1.5)
    memory = by_name["the same: peak memory of its step over compiled BF16's"]
    assert memory.measured(rows) == pytest.approx(0.7) and not memory.reached(0.7)
    assert "1.5 ×, goal reached" in "\n".join(goals.table(rows))
    assert "0.7 ×, goal missed" in "\n".join(goals.table(rows))


def test_goals_ask_for_rows_that_are_declared() -> None:
    """Each goal reads some row that a full run writes: with those of all benchmarks present it looks one up."""

    class Asked(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            seen.add(key)
            return default

    seen: set[str] = set()
    rows = Asked()
    assert all(goal.measured(rows) is None for goal in goals.GOALS)
    declared = {results.key_of(b.name, case.name) for b in suite.BENCHMARKS for case in b.cases}
    assert seen and seen <= declared | {results.key_of("parity", parity.ONE_B.name)}


def test_markdown_and_plots(tmp_path: Path) -> None:
    found = a_gpus(tmp_path)
    text = markdown(found)
    assert f"| {goals.LLAMA3} | ours | forward 2.000, backward 4.000 | 1.50 |" in text
    assert "- act-quant: left out, out of memory" in text
    assert "Measured in the same processes: 2000 to 2000 GB/s copied, 500 to 500 TFLOP/s BF16." in text
    assert plots._ratios(found.rows[f"layer: {goals.LLAMA3}"]) == pytest.approx({"ours": 1.5, "inductor": 1.0})


def test_readme_is_what_the_script_makes() -> None:
    text = readme_tables.README.read_text()
    assert readme_tables.made(text) == text, "run python benchmarks/readme_tables.py"


def test_readmes_block_is_made_from_the_newest_of_a_gpu_at_full_size(tmp_path: Path) -> None:
    assert readme_tables.measured(tmp_path) == "No GPU results yet: `bash benchmarks/gpu.sh`"
    a_gpus(tmp_path, "2026-01-05", tiny=True)
    a_gpus(tmp_path, "2026-01-06", gpu=False)
    assert readme_tables.measured(tmp_path) == readme_tables.NOTHING_YET
    a_gpus(tmp_path, "2026-01-03", device="younger")
    a_gpus(tmp_path, "2026-01-02", device="older")
    text = readme_tables.measured(tmp_path)
    assert text.startswith("younger, torch 9; [all figures](benchmarks/results/made-up-2026-01-03.json)")
    assert "goal reached" in text and "**layer**" in text


BEGIN, END = readme_tables.markers("gpu")


@pytest.mark.parametrize("text", ["", f"{END}{BEGIN}", BEGIN * 2, f"{BEGIN}{readme_tables.markers('layers')[1]}"])
def test_a_readme_without_its_markers_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="Fix: put them back"):
        readme_tables.replaced(text, "gpu", "new")
