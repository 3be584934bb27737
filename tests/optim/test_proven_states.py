"""What is proven of the states of every optimizer in torch.optim, and of states that a proof must not be found for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fp8compile.optim.proofs import NEVER_FORGETS, STAYS_IN, UNDER_A_ROOT
from tests.support.captured import CASES, Move, of_torch, own, update_of, wide

Group = dict[str, Any]
State = dict[str, Any]
LR = float(torch.tensor(0.1))  # as FP32 holds it

# By label: signed states, those that never are negative, why some stay exact, one-number states, what states begin as where
# it is not 0, whether elements need others.
PROVEN: dict[str, tuple[set[str], set[str], dict[str, str], tuple[str, ...], dict[str, float], bool]] = {
    "Adam": ({"exp_avg"}, {"exp_avg_sq"}, {}, (), {}, False),
    "AdamW": ({"exp_avg"}, {"exp_avg_sq"}, {}, (), {}, False),
    "AdamW amsgrad": (
        {"exp_avg"},
        {"exp_avg_sq", "max_exp_avg_sq"},
        {"exp_avg_sq": STAYS_IN.format("max_exp_avg_sq"), "max_exp_avg_sq": NEVER_FORGETS},
        (),
        {},
        False,
    ),
    "SGD": (set(), set(), {}, (), {}, False),
    "SGD momentum": ({"momentum_buffer"}, set(), {}, (), {}, False),
    "SGD nesterov": ({"momentum_buffer"}, set(), {}, (), {}, False),
    "SGD dampening": ({"momentum_buffer"}, set(), {}, (), {}, False),
    "Adadelta": (set(), {"square_avg", "acc_delta"}, {}, (), {}, False),
    "Adagrad": (set(), {"sum"}, {"sum": NEVER_FORGETS}, (), {"sum": 0.25}, False),
    "Adamax": ({"exp_avg"}, {"exp_inf"}, {}, (), {}, False),
    "NAdam": ({"exp_avg"}, {"exp_avg_sq"}, {}, ("mu_product",), {"mu_product": 1.0}, False),
    "RAdam": ({"exp_avg"}, {"exp_avg_sq"}, {}, (), {}, False),
    "RMSprop": ({"momentum_buffer"}, {"square_avg"}, {}, (), {}, False),
    "RMSprop centered": (
        {"grad_avg"},
        {"square_avg"},
        dict.fromkeys(("square_avg", "grad_avg"), UNDER_A_ROOT),
        (),
        {},
        False,
    ),
    "ASGD": ({"ax"}, set(), {"ax": NEVER_FORGETS}, ("eta", "mu"), {"mu": 1.0}, False),
    "Rprop": (
        {"prev"},
        {"step_size"},
        {"prev": STAYS_IN.format("step_size"), "step_size": NEVER_FORGETS},
        (),
        {},
        False,
    ),
    "Muon": ({"momentum_buffer"}, set(), {}, (), {}, True),
}


@pytest.mark.parametrize("label", CASES)
def test_what_is_proven_of_torch_optim(label: str) -> None:
    signed, never_negative, exact, singles, initial, whole_tensor = PROVEN[label]
    update = update_of(of_torch(label))
    assert {name for name, sign in update.states.items() if sign} == signed
    assert {name for name, sign in update.states.items() if not sign} == never_negative
    assert dict(update.exact) == exact
    assert update.singles == singles
    assert {name: value for name, value in update.initial.items() if value} == initial
    assert update.whole_tensor == whole_tensor


def test_a_beta_of_one_forgets_nothing() -> None:
    optimizer = of_torch("AdamW")
    optimizer.param_groups[0]["betas"] = (0.9, 0.9999999)
    assert update_of(optimizer).exact == {"exp_avg_sq": NEVER_FORGETS}


def begins_below(p: Tensor, g: Tensor, state: State, group: Group) -> None:
    v = state.setdefault("v", torch.full_like(p, -1.0))
    p.add_(v.mul_(0.9).addcmul_(g, g, value=0.1))


def begins_as_the_gradient(p: Tensor, g: Tensor, state: State, group: Group) -> None:
    v = state.setdefault("v", g.clone())
    p.add_(v.mul_(0.9).addcmul_(g, g, value=0.1))


def falls_below(p: Tensor, g: Tensor, state: State, group: Group) -> None:
    p.add_(wide(p, state).mul_(0.9).addcmul_(g, g, value=-0.1))


def falls_below_in_half_precision(p: Tensor, g: Tensor, state: State, group: Group) -> None:
    v = wide(p, state)
    p.add_(v.copy_((0.9 * v).bfloat16().sub((g * g).bfloat16(), alpha=0.5)))


def one_needs_the_other(p: Tensor, g: Tensor, state: State, group: Group) -> None:
    v, w = wide(p, state), wide(p, state, "w")
    p.add_(v.mul_(0.5).add_(w, alpha=0.25))
    w.mul_(0.5).add_(g)


@pytest.mark.parametrize(
    ("move", "names"),
    [
        (begins_below, {"v"}),
        (begins_as_the_gradient, {"v"}),
        (falls_below, {"v"}),
        (falls_below_in_half_precision, {"v"}),
        (one_needs_the_other, {"v", "w"}),
    ],
)
def test_states_that_may_be_negative(move: Move, names: set[str]) -> None:
    assert {name for name, sign in update_of(own(move)).states.items() if sign} == names


def root_of_a_difference(p: Tensor, g: Tensor, state: State, group: Group) -> None:
    p.add_((wide(p, state).mul_(0.9).addcmul_(g, g) - 0.5 * g).sqrt())


def root_as_a_power(p: Tensor, g: Tensor, state: State, group: Group) -> None:
    p.add_((wide(p, state).mul_(0.9).addcmul_(g, g) - 0.5 * g) ** 0.5)


def root_of_a_sum(p: Tensor, g: Tensor, state: State, group: Group) -> None:
    p.add_((wide(p, state).mul_(0.9).addcmul_(g, g) + 0.5).sqrt())


def square_of_a_difference(p: Tensor, g: Tensor, state: State, group: Group) -> None:
    p.add_((wide(p, state).mul_(0.9).addcmul_(g, g) - 0.5 * g) ** 2)


@pytest.mark.parametrize(
    ("move", "exact"),
    [
        (root_of_a_difference, {"v": UNDER_A_ROOT}),
        (root_as_a_power, {"v": UNDER_A_ROOT}),
        (root_of_a_sum, {}),
        (square_of_a_difference, {}),
    ],
)
def test_states_under_a_root(move: Move, exact: dict[str, str]) -> None:
    assert update_of(own(move)).exact == exact


def a_chain(p: Tensor, g: Tensor, state: State, group: Group) -> None:
    """A sum of what a decaying state was, which follows what another was."""
    v, w, total = (wide(p, state, name) for name in ("v", "w", "total"))
    p.add_(total.add_(w))
    w.mul_(0.5).add_(v)
    v.mul_(0.5).add_(g)


def test_a_rounding_reaches_what_keeps_it_in_later_steps_too() -> None:
    stays = STAYS_IN.format("total")
    assert update_of(own(a_chain)).exact == {"v": stays, "w": stays, "total": NEVER_FORGETS}
