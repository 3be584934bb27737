"""The numbers of a step by compiled code are those of operation by operation; how many parameters there are is left open."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8compile.optim import compiled_numbers, step_numbers
from fp8compile.optim.captured_updates import CapturedUpdates
from fp8compile.optim.step_numbers import StepNumbers

KINDS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "NAdam": {},  # with a number of its own, mu_product
    "RAdam": {},
    "ASGD": {},
    "SGD": {"momentum": 0.9},
}
ULP = 2.0**-22  # two libraries' powers, in FP64, may round otherwise to FP32; and a difference from 1 doubles that


@pytest.fixture(autouse=True)
def codes(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[Any, Any]]:
    """What code is compiled, for the CPU here."""
    monkeypatch.setattr(compiled_numbers, "_known", {})
    monkeypatch.setattr(compiled_numbers, "_fitting", {})
    monkeypatch.setattr(step_numbers, "in_one_kernel", lambda *_: True)
    yield compiled_numbers._known


class BothWays:
    """Steps of an optimizer's parameters, of which numbers are computed both ways."""

    def __init__(self, kind: str, lr: float | Tensor = 0.1) -> None:
        self.parameters = [nn.Parameter(torch.ones(4)) for _ in range(4)]
        optimizer = getattr(torch.optim, kind)(self.parameters, lr=lr, **KINDS[kind])
        self.group = optimizer.param_groups[0]
        self.update = CapturedUpdates(optimizer).of((4,), self.group)
        self.ways = StepNumbers(compiled=True), StepNumbers(compiled=False)
        begin = {"step": 0.0} | {name: self.update.initial[name] for name in self.update.singles}
        self.states = [
            {p: {name: torch.tensor(x) for name, x in begin.items()} for p in self.parameters} for _ in self.ways
        ]

    def step(self, *which: int) -> None:
        """Of these parameters. Raises AssertionError where the two differ."""
        chosen = [self.parameters[i] for i in which]
        for numbers, states in zip(self.ways, self.states, strict=True):
            places = numbers.compute([(p, self.group, self.update, states[p]) for p in chosen])
            numbers.leave()
            step_numbers.join(places)
            step_numbers.count(places)
        for p in chosen:
            assert_close(*(numbers.row(p, self.update) for numbers in self.ways))
            for name in ("step", *self.update.singles):
                assert_close(*(states[p][name] for states in self.states))


def assert_close(ours: Tensor, eager: Tensor) -> None:
    torch.testing.assert_close(ours, eager, rtol=ULP, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_of_operation_by_operation(kind: str, codes: dict[Any, Any]) -> None:
    both = BothWays(kind)
    for step in range(6):
        both.group["lr"] = 0.1 / (1 + step)
        both.step(0, 1, 2, 3)
    assert len(codes) <= 2, "counts of steps lie otherwise once they are joined"
    row = both.ways[0].row(both.parameters[0], both.update)
    assert len({*row.tolist()}) > 2


def test_code_fits_any_number_of_parameters_but_one(codes: dict[Any, Any]) -> None:
    both = BothWays("NAdam")
    for which in ((0, 1, 2), (0, 1), (2, 3), (3, 1, 0, 2)):
        both.step(*which)
    several = len(codes)
    assert several <= 3, "counts that are joined, stacked, and counts stacked for rows of other memory"
    both.step(2)
    assert len(codes) == several + 1
    both.step(3)
    assert len(codes) == several + 1


def test_a_learning_rate_that_is_a_tensor_is_read_at_every_step(codes: dict[Any, Any]) -> None:
    lr = torch.tensor(0.1, dtype=torch.float64)
    both = BothWays("SGD", lr)
    rows = []
    for _ in range(2):
        both.step(0, 1)
        rows.append(both.ways[0].row(both.parameters[0], both.update).clone())
        lr.mul_(0.5)
    assert codes and not torch.equal(*rows)


def test_code_that_does_not_fit_is_made_for_these_sizes_alone(
    codes: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_numbers.Fakes, "fit", lambda *_: False)
    BothWays("SGD").step(0, 1, 2)
    assert [key.parameters for key in codes] == [None, 3]
