"""Which steps are captured, for which numbers the graph of one holds, and what is refused with which reason."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8compile.optim.captured_updates import CapturedUpdates
from fp8compile.optim.initial_states import initial_states
from fp8compile.optim.proofs import BELOW_ONE
from fp8compile.optim.standing_in import NotCaptured
from tests.support.captured import SHAPE, Move, of_torch, own, update_of, wide

Group = dict[str, Any]
State = dict[str, Any]


def made(name: str, **options: Any) -> torch.optim.Optimizer:
    found: torch.optim.Optimizer = getattr(torch.optim, name)([nn.Parameter(torch.ones(SHAPE))], **options)
    return found


CHANGES: list[tuple[str, Group, Group, bool]] = [  # made with, changed to, whether the update is the same
    ("AdamW", {}, {"lr": 5e-4}, True),
    ("AdamW", {}, {"lr": 0.0}, False),
    ("AdamW", {}, {"lr": 2.0}, False),
    ("AdamW", {}, {"betas": (0.5, 0.9)}, True),
    ("AdamW", {}, {"betas": (0.9, BELOW_ONE)}, True),
    ("AdamW", {}, {"betas": (0.9, 0.9999999)}, False),
    ("AdamW", {"weight_decay": 0.0}, {"weight_decay": 0.1}, False),
    ("AdamW", {"weight_decay": 0.1}, {"weight_decay": 0.2}, True),
    ("AdamW", {"weight_decay": 0.1}, {"weight_decay": 0.0}, False),
    ("AdamW", {"weight_decay": 0}, {"weight_decay": 0.1}, False),
    ("AdamW", {"weight_decay": 0.1}, {"weight_decay": 0}, False),
    ("SGD", {"lr": 1}, {"lr": 0.5}, False),
    ("SGD", {"momentum": 0}, {"momentum": 0.9}, False),
    ("RMSprop", {"momentum": 0.9}, {"momentum": 0.5}, True),
    ("Muon", {}, {"weight_decay": 0.2}, True),
    ("Muon", {}, {"ns_coefficients": (3.0, -4.775, 2.0315)}, False),
    ("Muon", {}, {"lr": 0.5}, True),
]


@pytest.mark.parametrize(("name", "options", "changed", "same"), CHANGES)
def test_for_which_numbers_an_update_holds(name: str, options: Group, changed: Group, same: bool) -> None:
    optimizer = made(name, **options)
    [group] = optimizer.param_groups
    update = update_of(optimizer)
    assert update.holds(group)
    assert update.holds({**group, **changed}) == same


@pytest.mark.parametrize(("name", "options", "changed", "same"), CHANGES)
def test_a_change_captures_again_where_the_update_is_another(
    name: str, options: Group, changed: Group, same: bool
) -> None:
    optimizer = made(name, **options)
    [group] = optimizer.param_groups
    updates = CapturedUpdates(optimizer)
    before, version = updates.of(SHAPE, group), updates.version(group)
    assert updates.of(SHAPE, group) is before and updates.version(group) == version
    group.update(changed)
    assert (updates.version(group) == version) == same
    assert (updates.of(SHAPE, group) is before) == same


def test_an_option_that_flips_is_another_update() -> None:
    optimizer = of_torch("SGD momentum")
    [group] = optimizer.param_groups
    updates = CapturedUpdates(optimizer)
    before, version = updates.of(SHAPE, group), updates.version(group)
    group["nesterov"] = True
    assert updates.version(group) > version and updates.of(SHAPE, group).code != before.code


def test_one_update_for_all_shapes_of_as_many_dimensions() -> None:
    """Where elements know nothing of each other, and the step is torch.optim's, which does not look at shapes."""
    adam, muon = of_torch("AdamW"), of_torch("Muon")
    of_adam, of_muon, of_own = CapturedUpdates(adam), CapturedUpdates(muon), CapturedUpdates(own(by_rows))
    assert of_adam.of((4, 6), adam.param_groups[0]) is of_adam.of((8, 2), adam.param_groups[0])
    assert of_adam.of((4, 6), adam.param_groups[0]) is not of_adam.of((24,), adam.param_groups[0])
    assert of_muon.of((4, 6), muon.param_groups[0]) is not of_muon.of((8, 2), muon.param_groups[0])
    group = {"lr": 0.1}
    assert of_own.of((4, 6), group) is not of_own.of((8, 2), group)


def by_rows(p: Tensor, g: Tensor, state: State, group: Group) -> None:
    p.add_(g, alpha=-group["lr"] * p.shape[0])


def test_what_an_operation_takes_as_plain_numbers_is_constant() -> None:
    """Muon's products in BF16 take its coefficients so."""
    fixed = dict(update_of(of_torch("Muon")).captured.constants)
    assert fixed == {
        ("eps",): 1e-7,
        ("ns_coefficients", 0): 3.4445,
        ("ns_coefficients", 1): -4.775,
        ("ns_coefficients", 2): 2.0315,
    }
    assert update_of(of_torch("AdamW")).captured.constants == ()


def test_a_constant_that_becomes_a_tensor_is_no_constant() -> None:
    optimizer = of_torch("Muon")
    [group] = optimizer.param_groups
    update = update_of(optimizer)
    assert not update.holds({**group, "eps": torch.tensor(1e-7, dtype=torch.float64)})


def test_numbers_that_are_tensors_are_not_read() -> None:
    optimizer = made("AdamW", lr=torch.tensor(0.1))
    [group] = optimizer.param_groups
    update = update_of(optimizer)
    group["lr"].fill_(0.2)
    assert update.holds(group) and ("lr",) in update.captured.numbers


@pytest.mark.parametrize(
    ("schedule", "holds"),
    [
        (lambda lr: max(lr, 0.01), True),
        (lambda lr: lr if lr > 0.15 else 0.3, False),
        (lambda lr: lr**0.5, True),
        (lambda lr: math.exp(-lr), False),
        (lambda lr: math.log(lr), False),
        (lambda lr: float(lr), False),
    ],
)
def test_what_python_decides_by_a_number_is_a_guard(schedule: Any, holds: bool) -> None:
    def move(p: Tensor, g: Tensor, state: State, group: Group) -> None:
        p.add_(g * schedule(group["lr"]))

    optimizer = own(move)
    update = update_of(optimizer)
    assert update.holds(optimizer.param_groups[0])
    assert update.holds({"lr": 0.2}) == holds


def test_what_python_decides_in_the_first_step_is_a_guard() -> None:
    def move(p: Tensor, g: Tensor, state: State, group: Group) -> None:
        if not state:
            state["v"] = g * 2 if group["lr"] > 0.15 else g.clone()
        p.add_(state["v"].mul_(0.9))

    assert not update_of(own(move)).holds({"lr": 0.2})


def test_states_begin_as_they_do_whatever_the_shape() -> None:
    def move(p: Tensor, g: Tensor, state: State, group: Group) -> None:
        state.setdefault("a", torch.full_like(p, 0.5)).add_(g)
        state.setdefault("b", torch.full_like(p, 1 / p.numel())).add_(g)
        state.setdefault("c", g.clone()).add_(g)
        p.add_(state["a"] + state["b"] + state["c"])

    optimizer = own(move)
    found = initial_states(optimizer, optimizer.param_groups[0], SHAPE)
    assert {name: each.value for name, each in found.items()} == {"a": 0.5, "b": None, "c": None}
    assert all(each.like.shape == SHAPE for each in found.values())


def test_a_number_in_python_begins_before_it_is_counted() -> None:
    """Whether it is put there first, or the first step puts there what it makes of nothing."""

    def at_first(p: Tensor, g: Tensor, state: State, group: Group) -> None:
        if not state:
            state["t"] = 0
        state["t"] += 1
        p.add_(g, alpha=-group["lr"] / state["t"])

    def at_once(p: Tensor, g: Tensor, state: State, group: Group) -> None:
        state["t"] = state.get("t", 0) + 1
        p.add_(g, alpha=-group["lr"] / state["t"])

    for move in (at_first, at_once):
        update = update_of(own(move))
        t = torch.tensor([update.initial["t"]], dtype=torch.float64)
        for step in (1, 2, 3):
            numbers, count = [torch.tensor(0.1, dtype=torch.float64)], torch.tensor([step], dtype=torch.float64)
            [row], [t] = update.of_step(numbers, count, {"t": t})
            moved, _ = update(torch.zeros(SHAPE), torch.ones(SHAPE), {}, dict(zip(update.names, row, strict=True)))
            assert float(t) == step and bool(((moved + 0.1 / step).abs() <= 2.0**-24).all())
        assert update.singles == update.in_python == ("t",)


def random_noise(p: Tensor, g: Tensor, state: State, group: Group) -> None:
    p.add_(g + torch.randn_like(g), alpha=-group["lr"])


def later_noise(p: Tensor, g: Tensor, state: State, group: Group) -> None:
    """Its first step draws nothing."""
    noise = torch.randn_like(g) if "v" in state else 0
    wide(p, state).add_(g)
    p.add_(g + noise, alpha=-group["lr"])


def by_norm(p: Tensor, g: Tensor, state: State, group: Group) -> None:
    if g.norm() > 1:
        p.add_(g, alpha=-group["lr"])


def mean_of_rows(p: Tensor, g: Tensor, state: State, group: Group) -> None:
    p.add_(state.setdefault("rows", torch.zeros(p.shape[0], 1)).add_(g.mean(1, keepdim=True)))


def named(p: Tensor, g: Tensor, state: State, group: Group) -> None:
    p.add_(g, alpha=-group["lr"] * len(state.setdefault("name", "weight")))


def norm_of_all(p: Tensor, g: Tensor, state: State, group: Group) -> None:
    p.add_(g / (state.setdefault("norm", torch.tensor(0.0)).mul_(0.9).add_(g.norm()) + 1))


def half_precision(p: Tensor, g: Tensor, state: State, group: Group) -> None:
    state["v"] = wide(p, state).add(g).bfloat16()


def transposed(p: Tensor, g: Tensor, state: State, group: Group) -> None:
    state["v"] = wide(p, state).add(g).t()


def counts_elements(p: Tensor, g: Tensor, state: State, group: Group) -> None:
    p.add_(g / state.setdefault("n", torch.zeros_like(p, dtype=torch.int32)).add_(1))


def counts_by_two(p: Tensor, g: Tensor, state: State, group: Group) -> None:
    p.add_(g / state.setdefault("step", torch.tensor(0.0)).add_(2))


def counts_from_five(p: Tensor, g: Tensor, state: State, group: Group) -> None:
    p.add_(g / state.setdefault("step", torch.tensor(5.0)).add_(1))


def makes_one_later(p: Tensor, g: Tensor, state: State, group: Group) -> None:
    if "v" in state:
        p.add_(wide(p, state, "late").add_(g))
    p.add_(wide(p, state).mul_(0.9).add_(g))


def changes_the_group(p: Tensor, g: Tensor, state: State, group: Group) -> None:
    p.add_(g, alpha=-group["lr"])
    group["lr"] *= 0.5


REFUSED: list[tuple[Move, str]] = [
    (random_noise, "its step draws random numbers"),
    (later_noise, "its step draws random numbers"),
    (by_norm, "its step decides by values of tensors"),
    (mean_of_rows, "its state 'rows' has neither the parameter's shape nor one number"),
    (named, "its state 'name' is a str, neither a tensor nor a number"),
    (norm_of_all, "its state 'norm' is one number that is made from all elements"),
    (half_precision, "its state 'v' becomes a tensor of another shape or dtype"),
    (transposed, "its state 'v' becomes a tensor of another shape or dtype"),
    (counts_elements, "its state 'n' has integers for elements"),
    (counts_by_two, "its state 'step' does not count steps"),
    (counts_from_five, "its state 'step' does not count steps"),
    (makes_one_later, "its later steps have other states than its first: late"),
    (changes_the_group, "its step changes 'lr', which belongs to no parameter"),
]


@pytest.mark.parametrize(("move", "reason"), REFUSED)
def test_refused_with_the_reason(move: Move, reason: str) -> None:
    with pytest.raises(NotCaptured) as error:
        update_of(own(move))
    assert str(error.value) == reason
