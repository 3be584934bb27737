"""A parameter's row of numbers is that of its own step, of the group as it is now, and always in the same tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fp8compile.optim.captured_updates import CapturedUpdates
from fp8compile.optim.step_numbers import Member, StepNumbers, block_of
from tests.support.captured import SHAPE, Own, of_torch
from tests.support.within import U

BETAS = (0.9, 0.999)


class Numbers:
    """Those of an optimizer, and the states of its parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.updates, self.numbers = optimizer, CapturedUpdates(optimizer), StepNumbers()
        self.states: dict[Tensor, dict[str, Tensor]] = {}

    def member(self, p: Tensor) -> Member:
        [group] = [group for group in self.optimizer.param_groups if any(p is each for each in group["params"])]
        update = self.updates.of(tuple(p.shape), group)
        begin = {name: torch.tensor(update.initial[name]) for name in update.singles} | {"step": torch.tensor(0.0)}
        return p, group, update, self.states.setdefault(p, begin)

    def row(self, p: Tensor) -> Tensor:
        return self.numbers.row(p, self.member(p)[2])

    def step(self, *parameters: Tensor) -> None:
        """What an optimizer does around its step; these have gradients."""
        self.numbers.compute([self.member(p) for p in parameters])
        self.numbers.leave()
        for p in parameters:
            self.states[p]["step"] += 1


def parameters(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(SHAPE)) for _ in range(count)]


def adamw_row(step: int, lr: float, decay: float = 0.01) -> Tensor:
    """In the order of ``elements``: see test_short_forms.py."""
    rest1, rest2 = 1 - BETAS[0] ** step, 1 - BETAS[1] ** step
    return torch.tensor(
        [1 - lr * decay, BETAS[0], 1 - BETAS[0], BETAS[1], 1 - BETAS[1], 1 / rest2**0.5, 1e-8, -lr / rest1]
    )


def close(found: Tensor, expected: Tensor) -> bool:
    """But for FP32's rounding, of this and of that."""
    return bool(((found[: len(expected)] - expected).abs() <= 2 * U * expected.abs()).all())


def test_rows_lie_one_after_the_other_and_are_written_at_once_where_all_are_there() -> None:
    several = parameters(3)
    numbers = Numbers(torch.optim.AdamW(several, lr=0.1))
    numbers.step(*several)
    rows = [numbers.row(p) for p in several]
    whole = block_of(rows)
    assert whole is not None and torch.equal(whole, torch.stack(rows))
    assert {row.data_ptr() % 16 for row in rows} == {rows[0].data_ptr() % 16}
    for some in (several[1:], several[::-1], [several[0], several[2]]):
        assert (block_of([numbers.row(p) for p in some]) is None) == (some[0] is not several[1])
        numbers.step(*some)
        assert all(close(numbers.row(p), adamw_row(int(numbers.states[p]["step"]), 0.1)) for p in some)
    assert block_of([torch.empty(14), torch.empty(14)]) is None


def test_rows_stay_the_same_tensors_and_follow_the_step() -> None:
    a, b = parameters(2)
    numbers = Numbers(torch.optim.AdamW([a, b], lr=0.1))
    rows = [numbers.row(p) for p in (a, b)]
    places = [row.data_ptr() for row in rows]
    for step in (1, 2, 3):
        numbers.step(a, b)
        assert all(close(row, adamw_row(step, 0.1)) for row in rows)
        assert [numbers.row(p).data_ptr() for p in (a, b)] == places
    assert numbers.row(a) is rows[0] and numbers.row(b) is rows[1] and places[0] != places[1]


def test_parameters_of_one_group_at_steps_of_their_own() -> None:
    """One gets its first gradient later; one is left out of a step, and its row stays as it was."""
    a, b, c = parameters(3)
    numbers = Numbers(torch.optim.AdamW([a, b, c], lr=0.1))
    for several in ((a,), (a, c), (a, b, c)):
        numbers.step(*several)
    assert close(numbers.row(a), adamw_row(3, 0.1))
    assert close(numbers.row(b), adamw_row(1, 0.1))
    assert close(numbers.row(c), adamw_row(2, 0.1))
    numbers.step(a, b)
    assert close(numbers.row(b), adamw_row(2, 0.1)) and close(numbers.row(c), adamw_row(2, 0.1))


def test_groups_have_their_own_numbers_which_are_read_at_every_step() -> None:
    a, b = parameters(2)
    groups: list[dict[str, Any]] = [{"params": [a]}, {"params": [b], "lr": 0.5, "weight_decay": 0.2}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    numbers = Numbers(optimizer)
    numbers.step(a, b)
    row = numbers.row(a)
    assert close(row, adamw_row(1, 0.1)) and close(numbers.row(b), adamw_row(1, 0.5, 0.2))
    optimizer.param_groups[0]["lr"] = 0.2
    numbers.step(b, a)
    assert close(row, adamw_row(2, 0.2)) and close(numbers.row(b), adamw_row(2, 0.5, 0.2)) and numbers.row(a) is row


def test_a_learning_rate_that_is_a_tensor() -> None:
    """In FP32, as torch has it; what it holds is read at every step, whether changed in place or replaced."""
    [p] = parameters(1)
    rate = torch.tensor(0.5)
    optimizer = torch.optim.AdamW([p], lr=rate)
    numbers = Numbers(optimizer)
    numbers.step(p)
    row = numbers.row(p)
    assert close(row, adamw_row(1, 0.5))
    rate.fill_(0.25)
    numbers.step(p)
    assert close(row, adamw_row(2, 0.25))
    optimizer.param_groups[0]["lr"] = torch.tensor(0.125)
    numbers.step(p)
    assert close(row, adamw_row(3, 0.125))
    optimizer.param_groups[0]["lr"] = 0.75
    numbers.step(p)
    assert close(row, adamw_row(4, 0.75)) and numbers.row(p) is row


def test_one_number_states_are_written_by_leave_alone() -> None:
    a, b = parameters(2)
    numbers = Numbers(of_torch("NAdam", [a, b]))
    members = [numbers.member(p) for p in (a, b)]
    products = [numbers.states[p]["mu_product"] for p in (a, b)]
    numbers.numbers.compute(members)
    numbers.numbers.compute(members)  # one that came to nothing
    assert all(float(each) == 1.0 for each in products)
    numbers.numbers.leave()
    mu = 0.9 * (1 - 0.5 * 0.96**0.004)
    assert all(abs(float(each) - mu) <= U for each in products)
    numbers.numbers.leave()
    assert all(abs(float(each) - mu) <= U for each in products), "once"
    assert all(numbers.states[p]["mu_product"] is each for p, each in zip((a, b), products, strict=True))


def test_one_number_states_of_parameters_at_steps_of_their_own() -> None:
    """ASGD's step sizes: lr / (1 + lambd lr t)**alpha, which the next step takes."""
    a, b = parameters(2)
    numbers = Numbers(torch.optim.ASGD([a, b], lr=0.1, lambd=0.5))
    for several in ((a,), (a,), (a, b)):
        numbers.step(*several)
    for p, steps in ((a, 3), (b, 1)):
        eta = 0.1 / (1 + 0.5 * 0.1 * steps) ** 0.75
        assert abs(float(numbers.states[p]["eta"]) - eta) <= 2 * U * eta


def test_an_update_of_another_shape_has_numbers_of_its_own() -> None:
    """One group, the same operations on elements, but other numbers: a learning rate that depends on the shape."""

    def move(p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.add_(g, alpha=-group["lr"] * p.shape[0])

    a, b = nn.Parameter(torch.ones(4, 6)), nn.Parameter(torch.ones(8, 6))
    numbers = Numbers(Own([a, b], move))
    numbers.step(a, b)
    assert close(numbers.row(a), torch.tensor([-0.4])) and close(numbers.row(b), torch.tensor([-0.8]))


def test_a_one_number_state_that_is_filled() -> None:
    def move(p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["step"], state["eta"] = torch.tensor(0.0), torch.tensor(1.0)
        state["step"] += 1
        state["eta"].fill_(group["lr"] / state["step"])
        p.add_(g * state["eta"])

    a, b = parameters(2)
    numbers = Numbers(Own([a, b], move))
    numbers.step(a)
    numbers.step(a, b)
    assert close(numbers.row(a), torch.tensor([0.05])) and close(numbers.row(b), torch.tensor([0.1]))
    assert abs(float(numbers.states[a]["eta"]) - 0.05) <= U * 0.05
