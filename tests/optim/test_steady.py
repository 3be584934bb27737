"""Steps like the one before look at little; each change is noticed, and the numbers are those of looking at all."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8compile import optim
from fp8compile.optim import base
from fp8compile.optim.compiled_step import PreparedStep
from fp8compile.optim.steady import Steady
from tests.support.reference import bits_equal


def made(state_format: str = "fp32") -> optim.AdamW:
    """By default without codes, which take long to generate code for."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(8 + i, 640, generator=generator)) for i in range(3)]
    return optim.AdamW(parameters, lr=1e-2, state_format=state_format)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def give_gradients(optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in parameters_of(optimizer):
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


@pytest.fixture
def went_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Of each step but the first, whether it was like the one before."""
    found: list[bool] = []
    plain = Steady.goes_on

    def noted(self: Steady, *args: Any) -> bool:
        found.append(plain(self, *args))
        return found[-1]

    monkeypatch.setattr(Steady, "goes_on", noted)
    yield found


def test_steps_go_on_under_a_schedule(went_on: list[bool]) -> None:
    optimizer = made()
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(5):
        give_gradients(optimizer, step)
        optimizer.step()
        schedule.step()
    assert went_on == [True] * 4


def test_a_look_at_one_parameter_between_steps_changes_nothing(went_on: list[bool]) -> None:
    """The numbers of a step are those of all its parameters, whichever were asked for last."""
    looked_at, other = made(), made()
    for step in range(4):
        for optimizer in (looked_at, other):
            give_gradients(optimizer, step)
        if step:
            looked_at.step_function(parameters_of(looked_at)[1])  # type: ignore[arg-type]
        looked_at.step()
        other.step()
    assert went_on == [True] * 6
    for p, q in zip(parameters_of(looked_at), parameters_of(other), strict=True):
        assert bits_equal(p, q)


Change = Callable[[optim.AdamW], object]


def first(optimizer: torch.optim.Optimizer) -> Any:
    return parameters_of(optimizer)[0]


def no_gradient(optimizer: optim.AdamW) -> None:
    first(optimizer).grad = None


def turned_gradient(optimizer: optim.AdamW) -> None:
    first(optimizer).grad = first(optimizer).grad.t().contiguous().t()


def other_memory(optimizer: optim.AdamW) -> None:
    first(optimizer).data = first(optimizer).data.clone()


def another_state(optimizer: optim.AdamW) -> None:
    state = optimizer.state[first(optimizer)]
    state.update({name: t.clone() for name, t in state.items()})


def another_dict(optimizer: optim.AdamW) -> None:
    p = first(optimizer)
    optimizer.state[p] = {name: t.clone() for name, t in optimizer.state[p].items()}


def another_parameter(optimizer: optim.AdamW) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4, 640))]})
    parameters_of(optimizer)[-1].grad = torch.ones(4, 640)


CHANGES: dict[str, Change] = {
    "an edit": lambda optimizer: first(optimizer).mul_(1.5),
    "no gradient": no_gradient,
    "a gradient of another layout": turned_gradient,
    "other memory": other_memory,
    "another state": another_state,
    "another dict of states": another_dict,
    "a parameter more": another_parameter,
    "another option": lambda optimizer: optimizer.param_groups[0].update(amsgrad=True),
    "a state dict": lambda optimizer: optimizer.load_state_dict(optimizer.state_dict()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed_and_the_step_is_that_of_looking_at_all(change: str, went_on: list[bool]) -> None:
    noticed("fp32", change, went_on)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed_where_states_are_codes(change: str, went_on: list[bool]) -> None:
    noticed("e4m3_expanded", change, went_on)


def noticed(state_format: str, change: str, went_on: list[bool]) -> None:
    """The step after a change is that of an optimizer that looks at everything."""
    steady, looking = made(state_format), made(state_format)
    for step in range(5):
        for optimizer in (steady, looking):
            give_gradients(optimizer, step)
            if step == 3:
                with torch.no_grad():
                    CHANGES[change](optimizer)
        looking._steady = None
        looking.step()
        steady.step()
    assert went_on[:2] == [True, True] and sum(went_on) <= 3
    for ours, theirs in zip(parameters_of(steady), parameters_of(looking), strict=True):
        assert torch.equal(ours, theirs)
        for name, state in steady.state[ours].items():
            assert bits_equal(state.float(), looking.state[theirs][name].float()), name


def test_a_sparse_gradient_is_still_refused() -> None:
    optimizer = made()
    for _ in range(2):
        give_gradients(optimizer, 0)
        optimizer.step()
    first(optimizer).grad = torch.eye(8, 640).to_sparse()
    with pytest.raises(RuntimeError, match="sparse gradient"):
        optimizer.step()


def test_parameters_that_come_and_go_are_prepared_once_for_each_choice_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Experts without a token have no gradient: their counts of steps stand where they stood."""
    optimizer, other = made(), made()
    prepared: list[int] = []
    plain = base.PreparedStep

    def noted(several: Any, **options: Any) -> PreparedStep:
        prepared.append(len(several))
        return plain(several, **options)

    monkeypatch.setattr(base, "PreparedStep", noted)
    for step, absent in enumerate((0, None, 1, 0, 1, None, 0)):
        give_gradients(optimizer, step)
        give_gradients(other, step)
        for each in (optimizer, other):
            if absent is not None:
                parameters_of(each)[absent].grad = None
        optimizer.step()
        other._steady, other._steps = None, {}  # look at all, each time
        other.step()
    assert prepared == [2, 2, 3, 3, 2, 2, 2, 2, 3, 2]
    counts = [int(optimizer.state[p]["step"]) for p in parameters_of(optimizer)]
    assert counts == [4, 5, 7] == [int(other.state[p]["step"]) for p in parameters_of(other)]
    assert all(map(bits_equal, parameters_of(optimizer), parameters_of(other)))
    begins = [state["step"].data_ptr() % 16 for state in optimizer.state.values()]
    assert begins == [0, 0, 0]
    whole = [state["step"] for state in optimizer.state_dict()["state"].values()]
    assert all(step._base is None and step.untyped_storage().nbytes() == 4 for step in whole)


def test_gradients_are_not_held_behind_a_step(went_on: list[bool]) -> None:
    optimizer = made()
    for step in range(3):
        give_gradients(optimizer, step)
        held = [weakref.ref(p.grad) for p in parameters_of(optimizer) if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        assert len(held) == 3 and all(ref() is None for ref in held), step
    assert went_on == [True, True]
