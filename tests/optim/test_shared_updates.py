"""optim.shared_updates: a class of optimizers is captured once in a process, and what is shared is the update that it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from fp8compile.optim import captured_updates, shared_updates
from fp8compile.optim.captured_update import CapturedUpdate, captured_update
from fp8compile.optim.captured_updates import CapturedUpdates

MATRIX, VECTOR = (4, 3), (4,)


@pytest.fixture(autouse=True)
def captures(monkeypatch: pytest.MonkeyPatch) -> Iterator[mock.Mock]:
    """Each capture, of a process that has made none before."""
    monkeypatch.setattr(shared_updates, "_known", {})
    seen = mock.Mock(side_effect=captured_update)
    monkeypatch.setattr(shared_updates, "captured_update", seen)
    monkeypatch.setattr(captured_updates, "captured_update", seen)
    yield seen


def update_of(kind: type[torch.optim.Optimizer], shape: tuple[int, ...] = MATRIX, **options: Any) -> CapturedUpdate:
    optimizer = kind([nn.Parameter(torch.zeros(shape))], **options)  # type: ignore[call-arg]
    return CapturedUpdates(optimizer).of(shape, optimizer.param_groups[0])


def test_objects_and_groups_that_differ_in_numbers_share_it(captures: mock.Mock) -> None:
    first = update_of(torch.optim.AdamW)
    assert update_of(torch.optim.AdamW, lr=0.5, betas=(0.5, 0.25), eps=1e-3) is first
    assert update_of(torch.optim.AdamW, (7, 9)) is first and captures.call_count == 1
    parameters = [{"params": [nn.Parameter(torch.zeros(MATRIX))], "lr": 0.1 * 0.9**i} for i in range(20)]
    optimizer = torch.optim.AdamW(parameters)
    updates = CapturedUpdates(optimizer)
    assert all(updates.of(MATRIX, group) is first for group in optimizer.param_groups)
    assert captures.call_count == 1


@pytest.mark.parametrize(
    ("kind", "options", "others"),
    [
        (torch.optim.AdamW, {}, {"amsgrad": True}),
        (torch.optim.AdamW, {}, {"maximize": True}),
        (torch.optim.AdamW, {}, {"weight_decay": 0.0}),  # a branch that looks at the number
        (torch.optim.AdamW, {}, {"weight_decay": 0}),
        (torch.optim.AdamW, {}, {"lr": torch.tensor(0.1)}),
        (torch.optim.Adagrad, {"initial_accumulator_value": 0.25}, {"initial_accumulator_value": 0.5}),
        (torch.optim.SGD, {"momentum": 0.5}, {"momentum": 0.0}),
        (torch.optim.SGD, {"momentum": 0.5}, {"momentum": 0.5, "nesterov": True}),
    ],
)
def test_other_options_and_other_beginnings_are_captured_by_themselves(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], others: dict[str, Any], captures: mock.Mock
) -> None:
    first, second = update_of(kind, **options), update_of(kind, **others)
    assert second is not first and captures.call_count == 2
    assert update_of(kind, **options) is first and update_of(kind, **others) is second
    assert captures.call_count == 2


def test_other_numbers_of_dimensions_are_captured_by_themselves(captures: mock.Mock) -> None:
    assert update_of(torch.optim.AdamW, VECTOR) is not update_of(torch.optim.AdamW)


def test_a_step_that_mixes_elements_is_shared_by_equal_shapes_alone(captures: mock.Mock) -> None:
    first = update_of(torch.optim.Muon)
    assert first.whole_tensor and update_of(torch.optim.Muon) is first
    assert update_of(torch.optim.Muon, (8, 3)) is not first


def test_a_class_of_ones_own_is_captured_for_each_object(captures: mock.Mock) -> None:
    """Its step may look at attributes."""

    class Own(torch.optim.AdamW):
        pass

    assert update_of(Own) is not update_of(Own) and captures.call_count == 2


def test_a_step_that_was_replaced_is_captured_anew(captures: mock.Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    first = update_of(torch.optim.SGD)

    def step(self: torch.optim.SGD, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=2 * group["lr"])

    monkeypatch.setattr(torch.optim.SGD, "step", step)
    assert update_of(torch.optim.SGD) is not first


def test_not_more_are_kept_than_a_program_has(captures: mock.Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_updates, "MOST", 2)
    for length in range(1, 6):
        update_of(torch.optim.AdamW, (2,) * length)
        assert len(shared_updates._known) <= 2
