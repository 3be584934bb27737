"""The study of memory budgets: which cells are measured, and what the page says of them. Nothing is compiled."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.harness import budget_section
from benchmarks.studies import bench_budget
from fp8compile.reporting.budget import Budget, Point

PEAKS = (100, 80, 90, 30)  # of the frontier's states
GRADIENTS = 7


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was measured, by budget; a state's measured peak is the predicted one and ``GRADIENTS``."""
    asked: list[Any] = []

    def measured(case: Any, **options: Any) -> tuple[int, Any]:
        if not options:
            asked.append(("pytorch", torch._functorch.config.activation_memory_budget))
            return 1000, SimpleNamespace(budgets=())
        budget = options["options"]["memory"]
        asked.append(("ours", budget))
        at = bench_budget.at_budget(PEAKS, budget)
        told = Budget(budget, int(budget * PEAKS[0]), tuple(Point(0, peak, 0) for peak in PEAKS), at)
        return PEAKS[at] + GRADIENTS, SimpleNamespace(budgets=() if budget == 1.0 else (told,))

    monkeypatch.setattr(bench_budget, "measured", measured)
    monkeypatch.setattr(bench_budget.fp8compile, "report", lambda run: run, raising=False)
    return asked


def test_a_state_is_measured_once_and_the_default_by_itself(compiled: list[Any]) -> None:
    """1.0 is the default, without the rules of budgets: it stands for no other state."""
    found: dict[str, Any] = {}
    for _ in bench_budget.ours(SimpleNamespace(), found):  # type: ignore[arg-type]
        pass
    assert compiled == [("ours", 1.0), ("ours", 0.95), ("ours", 0.75)]
    assert list(found["ours"]) == [str(budget) for budget in bench_budget.BUDGETS]
    chosen = {budget: cell["state"] for budget, cell in found["ours"].items()}
    assert (chosen["1.0"], chosen["0.8"], chosen["0.75"], chosen["0.05"]) == (0, 1, 3, 3)
    assert found["ours"]["0.05"]["peak"] == PEAKS[3] + GRADIENTS


def test_a_run_that_was_cut_off_goes_on(compiled: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "budget.json"
    words = ["--models", "32 layers", "--json", str(path)]
    bench_budget.main(words)
    whole = json.loads(path.read_text())["models"]
    assert len(whole["32 layers"]["pytorch"]) == len(bench_budget.BUDGETS)
    cut = json.loads(path.read_text())
    for budget in ("0.2", "0.1"):
        del cut["models"]["32 layers"]["pytorch"][budget]
    path.write_text(json.dumps(cut))
    compiled.clear()
    bench_budget.main(words)
    assert compiled == [("pytorch", 0.2), ("pytorch", 0.1)]
    assert json.loads(path.read_text())["models"] == whole


def test_what_the_page_says_of_a_model(tmp_path: Path) -> None:
    ours = {"1.0": 9, "0.5": 5, "0.25": 6}
    model = {
        "about": "a model",
        "ours": {budget: {"peak": peak * 10**6} for budget, peak in ours.items()},
        "pytorch": {"1.0": 9_000_000, "0.5": 4_000_000},
    }
    (tmp_path / budget_section.NAME).write_text(json.dumps({"models": {"toy": model}}))
    lines = budget_section.budgets(tmp_path)
    assert (
        "- toy: a model. Ours rises 1 times, PyTorch's 0 times; ours is above PyTorch's at 1 of 2 budgets." in lines
    )
    assert "| 0.5 | 5.0 / 4.0 |" in lines and "| 0.25 | 6.0 / - |" in lines
