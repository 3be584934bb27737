"""memory="fit": what a card has left for forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fp8compile
from fp8compile._text import human
from fp8compile.memory.fitting import GIB, Room, room_on
from fp8compile.passes.recompute_for_budget import NOT_WHOLE
from fp8compile.reporting.budget import Budget
from fp8compile.reporting.entries import Notes
from tests.support.budgets import PLAIN, Steps, budget_of, split_under
from tests.support.graphs import split_of


def fit_of(model: nn.Module, x: Tensor, card: int) -> Budget:
    notes: list[Notes] = []
    split_under("fit", model, x, notes, **PLAIN, **{"memory.card_gib": card / 1024**3})
    (told,) = notes[0].budgets
    return told


def test_fit_takes_what_the_card_has_left() -> None:
    """The cheapest state whose whole step is within the card: with two moments, parameters are held three times."""
    model, x = Steps(8), torch.randn(1024, 64)
    held = 3 * sum(p.nbytes for p in model.parameters())
    free, _ = budget_of(model, x, 0.99, **PLAIN)
    peaks = [point.peak for point in free.frontier]
    for peak in (peaks[0], peaks[2], min(peaks)):
        told = fit_of(model, x, held + peak)
        assert told.is_met and told.chosen == next(at for at, other in enumerate(peaks) if other <= peak)
        assert (told.held, told.target) == (held, peak)
    assert "of the step" in str(told)


def test_fit_says_what_is_missing() -> None:
    model, x = Steps(8), torch.randn(1024, 64)
    weights = sum(p.nbytes for p in model.parameters())
    held, update = 3 * weights, 2 * weights  # update: all gradients, and a temporary of that size
    told = fit_of(model, x, held + update)  # room for the optimizer's step, and less than the smallest peak
    least = min(point.peak for point in told.frontier)
    assert not told.is_met and told.frontier[told.chosen].peak == least
    assert f"does not fit at any budget, {human(least - update)} too much" in str(told)
    assert "does not fit at any budget: parameters and optimizer states take" in str(fit_of(model, x, held))


def test_fit_needs_the_whole_model() -> None:
    class Broken(Steps):
        def forward(self, x: Tensor) -> Tensor:
            first, *others = self.steps
            x = torch.tanh(first(x))
            torch._dynamo.graph_break()
            for step in others:
                x = torch.tanh(step(x))
            return x

    options = {**PLAIN, "memory": "fit", "memory.card_gib": 1.0}
    compiled = torch.compile(Broken(4), backend="fp8compile", options=options)
    compiled(torch.randn(128, 64)).sum().backward()
    assert {told.reason for told in fp8compile.report(compiled).budgets} == {NOT_WHOLE}


def test_what_is_held_beside_the_peak_is_parameters_and_two_moments_of_what_trains() -> None:
    """While AdamW steps, gradients and a temporary of that size are there too. A frozen parameter has neither."""
    model = Steps(3)
    one = model.steps[0].weight.nbytes  # type: ignore[union-attr]
    model.steps[0].weight.requires_grad_(False)  # type: ignore[union-attr]
    room = room_on(0.5, split_of(model, torch.randn(128, 64), memory=10**9, **PLAIN))
    assert room == Room(held=3 * one + 2 * 2 * one, update=2 * 2 * one, card=GIB // 2)
    assert room.left == GIB // 2 - room.held
