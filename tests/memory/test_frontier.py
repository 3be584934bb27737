"""The states of a graph, and which of them a budget chooses."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from fp8compile.memory.frontier import State, chosen
from fp8compile.recipe.recipe import Recipe
from tests.support.budgets import BUDGETS, CASES, PLAIN, Gated, Llama, budget_of, case_of
from tests.support.graphs import split_of


@pytest.mark.parametrize("name", [*CASES, "deep"])
def test_a_smaller_budget_never_has_a_higher_peak(name: str) -> None:
    model, x = (Gated(), torch.randn(128, 32)) if name == "deep" else case_of(name)
    told, _ = budget_of(model, x, 0.99, **PLAIN)
    points = [State((), (), p.saved, p.peak, p.us) for p in told.frontier]
    found = [chosen(points, int(budget * points[0].peak)) for budget in BUDGETS]
    assert all(after.peak <= before.peak for before, after in itertools.pairwise(found))
    assert all(after.us >= before.us for before, after in itertools.pairwise(found))
    assert found[-1].peak < 0.85 * points[0].peak
    assert all(
        state.peak <= budget * points[0].peak or state is found[-1]
        for budget, state in zip(BUDGETS, found, strict=True)
    )


def test_what_cannot_be_reached_is_said() -> None:
    model, x = case_of("steps")
    (told,) = fp8compile.explain(model, (x,), recipe=Recipe.preset("off", memory=2)).budgets
    assert not told.is_met and "not reached" in str(told)
    assert told.frontier[told.chosen].peak == min(point.peak for point in told.frontier)


@pytest.mark.sweep
def test_saved_bytes_of_a_llama_layer_by_budget() -> None:
    """Bytes saved for each of 8 layers, in units of a layer's input in BF16: the default, and budgets of the peak.

    16,384 tokens, so that activations and not gradients of parameters are most of the peak. With 256 tokens gradients are:
    nothing given up lowers the peak, and nothing is given up.
    """
    torch.manual_seed(0)
    model, x = Llama(8, 512, 1376).bfloat16(), torch.randn(256, 64, 512, dtype=torch.bfloat16)
    unit = 8 * x.nbytes
    default = split_of(model, x, linears="off").saved_bytes() / unit
    found = {}
    for budget in (0.5, 0.25):
        _, split = budget_of(model, x, budget, linears="off")
        found[budget] = split.saved_bytes() / unit
    assert default <= 5.9 and found[0.5] <= 3.0 and found[0.25] <= 1.6, (default, found)


class Drops(nn.Module):
    """So many dropouts that their seeds, 8 bytes each, are a value of the size that a budget looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        for _ in range(512):
            x = nn.functional.dropout(x, 0.01)
        return x


def test_seeds_of_dropout_are_not_given_up() -> None:
    (told,) = fp8compile.explain(Drops(), (torch.randn(8, 8),), recipe=Recipe.preset("off", memory=0.5)).budgets
    assert told.frontier
