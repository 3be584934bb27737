"""tune's choices: the rule, on rows that were made for it; what its times are summarised to; which arms, how many steps."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from fp8compile import Recipe
from fp8compile.tools.tuning import arms
from fp8compile.tools.tuning.arms import OFF, PLAIN, arms_for
from fp8compile.tools.tuning.choice import MEMORY, SPEED, best_of
from fp8compile.tools.tuning.rounds import steps_of_a_turn
from fp8compile.tools.tuning.rows import TunedRow, beside, summary

LIMIT = 0.25
RATIOS = (0.5, 0.97, 0.99, 1.0, 1.015, 1.03, 1.2, 1.3)
PEAKS = (50, 98, 99, 100, 103, 150)


def row(
    name: str = "a", ratio: float = 1.0, peak: int | None = 100, below: int | None = 0, **others: Any
) -> TunedRow:
    doubt = others.pop("doubt", 0.0)
    return TunedRow(name, Recipe(), ratio / 100, 0.0, ratio, doubt, peak=peak, below=below, **others)


def plain(**others: Any) -> TunedRow:
    return row(PLAIN, **others)


def chosen(*others: TunedRow, goal: str = SPEED, first: TunedRow | None = None) -> str:
    best = best_of([first or plain(), *others], goal, LIMIT)
    return best.name if best is not None else "none"


@pytest.mark.parametrize("first", RATIOS)
def test_speed_is_the_fastest_with_good_gradients_and_what_is_alike_the_simplest(first: float) -> None:
    for second, below, worse in itertools.product(RATIOS, (0, 1, None), (0, 3)):
        rows = [plain(), row("a", first, below=below), row("b", second, below=worse)]
        best = best_of(rows, SPEED, LIMIT)
        assert best is not None and best.below == 0 and best.ratio <= 1.02
        good = [each for each in rows if each.below == 0]
        fastest = min(each.ratio for each in good)
        assert best.ratio <= fastest * 1.02 + 1e-12
        before = good[: good.index(best)]
        assert all(each.ratio > fastest * 1.02 for each in before), "a simpler one is alike"


@pytest.mark.parametrize("first", RATIOS)
def test_memory_is_the_least_peak_that_is_fast_enough_and_what_is_alike_the_simplest(first: float) -> None:
    for peak, second, other, below in itertools.product(PEAKS, RATIOS, PEAKS, (0, 1)):
        rows = [plain(), row("a", first, peak), row("b", second, other, below=below)]
        best = best_of(rows, MEMORY, LIMIT)
        assert best is not None and best.below == 0 and best.ratio <= 1 + LIMIT and best.peak is not None
        allowed = [each for each in rows if each.below == 0 and each.ratio <= 1 + LIMIT]
        least = min(each.peak for each in allowed if each.peak is not None)
        assert best.peak <= least * 1.02
        before = allowed[: allowed.index(best)]
        assert all(each.peak is not None and each.peak > least * 1.02 for each in before), "a simpler one is alike"


def test_a_gain_within_the_doubt_of_the_measurement_is_none() -> None:
    assert chosen(row("a", 0.9, doubt=0.05)) == "a"
    assert chosen(row("a", 0.9, doubt=0.15)) == PLAIN
    assert chosen(row("a", 0.5, doubt=math.inf)) == PLAIN, "one round shows nothing"
    assert chosen(row("simple", 0.95, doubt=0.06), row("fast", 0.9)) == "simple"


def test_doubt_is_no_reason_to_be_slower_than_plain() -> None:
    assert chosen(row("doubtful", 1.3, doubt=0.9), row("fast", 0.5, doubt=0.4)) == "fast"


def test_a_recipe_that_was_not_timed_is_not_chosen() -> None:
    broken = TunedRow("broken", Recipe(), peak=1, below=0, note="out of memory")
    assert chosen(broken) == PLAIN and chosen(broken, goal=MEMORY) == PLAIN


def test_where_plain_inductor_did_not_run_the_fastest_is_what_others_are_compared_with() -> None:
    failed = TunedRow(PLAIN, OFF, note="out of memory")

    def alone(name: str, seconds: float, peak: int, below: int | None = 0) -> TunedRow:
        return TunedRow(name, Recipe(), seconds, peak=peak, below=below)

    both = alone("slow", 0.5, 50), alone("fast", 0.1, 100)
    assert chosen(*both, first=failed) == "fast" and chosen(*both, first=failed, goal=MEMORY) == "fast"
    near = alone("near", 0.12, 50), alone("fast", 0.1, 100)
    assert chosen(*near, first=failed) == "fast" and chosen(*near, first=failed, goal=MEMORY) == "near"
    unknown = alone("unknown", 0.1, 100, below=None), alone("bad", 0.05, 10, below=1)
    assert chosen(*unknown, first=failed) == "unknown", "nothing is known of gradients: chosen without"
    assert chosen(row("bad", 0.5, below=2), first=failed) == "none"


def test_what_nothing_is_known_of_is_not_chosen_beside_plain() -> None:
    assert chosen(row("unknown", 0.1, below=None)) == PLAIN


def test_where_no_peak_was_measured_memory_is_speed() -> None:
    assert chosen(row("fast", 0.8, None), first=plain(peak=None), goal=MEMORY) == "fast"


def test_medians_spreads_and_ratios() -> None:
    assert all(map(math.isnan, summary([]))) and summary([2.0]) == (2.0, 0.0)
    assert summary([1.0, 2.0, 3.0]) == (2.0, 1.0)
    ratio, doubt = beside({1: 3.0, 2: 20.0, 3: 2.0, 9: 1e9}, {0: 1e-9, 1: 1.0, 2: 10.0, 3: 2.0})
    assert ratio == 2.0 and doubt == pytest.approx(2.0 / math.sqrt(3)), "a slow round is slow for both"
    assert math.isnan(beside({1: 1.0}, {2: 1.0})[0]) and beside({1: 1.0}, {1: 2.0}) == (0.5, math.inf)


def test_recipes_suit_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def names(recipes: Any = None) -> list[str]:
        return [arm.name for arm in arms_for(recipes, torch.device("cpu"))]

    monkeypatch.setattr(arms, "int8_unsupported_reason", lambda device: "no")
    assert names() == [PLAIN, "storage", "half_budget", "few_bits"]
    monkeypatch.setattr(arms, "int8_unsupported_reason", lambda device: None)
    assert names() == [PLAIN, "storage", "half_budget", "int8", "few_bits"]
    monkeypatch.setattr(arms, "fp8_unsupported_reason", lambda device: None)
    assert names() == [PLAIN, "storage", "linears", "speed", "default", "all_codes", "delayed", "few_bits"]
    asked = ["off", "default", {}, {"linears.scaling": "delayed"}, Recipe(saved="off")]
    assert names(asked) == [PLAIN, "default", "linears.scaling=delayed", "saved='off'"], "each once"


def test_steps_of_a_turn() -> None:
    assert [steps_of_a_turn(s) for s in (1e-4, 0.01, 0.03, 0.2, 60.0)] == [10, 10, 3, 1, 1]
