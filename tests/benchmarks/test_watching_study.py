"""What the study of watching makes of its times, and the page of results of what it found."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.harness.watching_section import FILE, watching
from benchmarks.studies.bench_watching import Arm, summary


def arm(seconds: list[list[float]], own: float = 0.0) -> Arm:
    """``own``: seconds in the watcher. The first block compiles."""
    training: Any = SimpleNamespace(run=SimpleNamespace(losses=[1.0, 2.0]))
    return Arm(training, SimpleNamespace(own_seconds=own), seconds)


def test_figures_are_of_all_blocks_but_the_first() -> None:
    plain = arm([[90.0], [1.0, 1.0, 7.0], [2.0, 2.0, 2.0], [4.0, 4.0, 4.0]])
    watched = arm([[99.0], [1.1, 1.1, 1.1], [2.0, 2.0, 9.0], [3.6, 3.6, 3.6]], own=0.027)
    found = summary(plain, watched)
    assert found["side_by_side"] == pytest.approx(0.0) and found["losses_are_equal"]
    assert found["own_time"] == pytest.approx(0.027 / (3.3 + 13 + 10.8))
    assert found["own_milliseconds_a_step"] == pytest.approx(3.0)


def test_a_difference_of_losses_is_said(tmp_path: Path) -> None:
    run = {
        "steps": 300,
        "step_seconds_watched": 0.25,
        "own_milliseconds_a_step": 0.5,
        "own_time": 0.002,
        "side_by_side": 0.001,
        "side_by_side_quartiles": [-0.01, 0.02],
        "dashboard": 0.0015,
        "environment": {},
        "losses_are_equal": False,
    }
    (tmp_path / FILE).write_text(json.dumps({"plain": run, "observed": run}))
    text = "\n".join(watching(tmp_path))
    assert "**Losses of both differ.**" in text
    assert "| 300 | 250 | 0.50 | 0.20 % | +0.1 % (-1.0 % to +2.0 %) | 0.15 % |" in text
