"""What a report says of a memory budget: one line, and a picture."""

from __future__ import annotations

from pathlib import Path

import pytest

import fp8compile
from fp8compile.recipe.recipe import Recipe
from fp8compile.reporting.budget import Budget, Point
from tests.support.budgets import case_of

KIB = 1024
POINTS = ((64, 0), (48, 10), (56, 20), (32, 30), (32, 40), (16, 50), (8, 60), (4, 70), (90, 80))
TOLD = Budget(0.5, 32 * KIB, tuple(Point(0, peak * KIB, us) for peak, us in POINTS), 3, "H100")


def test_the_frontier_is_what_some_budget_chooses() -> None:
    """A state whose peak is no lower than one that costs less is not on it."""
    assert TOLD.lowest == (0, 1, 3, 5, 6, 7)


def test_one_line_of_it() -> None:
    assert TOLD.line == (
        "its frontier, peak at us of repeating: 64.0 KiB at 0, 48.0 KiB at 10, 32.0 KiB at 30, 8.0 KiB at 60, 4.0 KiB at 70"
    )


def test_the_report_prints_it() -> None:
    model, x = case_of("steps")
    report = fp8compile.explain(model, (x,), recipe=Recipe.preset("off", memory=0.5, debug={"codegen": "eager"}))
    (told,) = report.budgets
    assert told.line in " ".join(str(report).split())


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    TOLD.plot(tmp_path / "frontier.png")
    picture = imread(tmp_path / "frontier.png")
    red = (picture[..., 0] > 0.7) & (picture[..., 1] < 0.4) & (picture[..., 2] < 0.2)
    assert red.any(), "the state that was taken is marked"
    assert picture.shape[0] > 400


def test_no_frontier_no_picture(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="it has sizes"):
        Budget(0.5, reason="it has sizes that only a run knows").plot(tmp_path / "frontier.png")
