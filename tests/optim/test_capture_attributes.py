"""A step is captured of what belongs to a parameter. Attributes of the optimizer stay as they are, or it is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from fp8compile import optim
from fp8compile.optim import captured_updates
from fp8compile.optim.captured_updates import CapturedUpdates
from fp8compile.optim.standing_in import NotCaptured
from tests.support.captured import SHAPE, Own, of_torch, update_of

Group = dict[str, Any]
State = dict[str, Any]


class Counting(Own):
    """Its learning rate falls with a count of its own."""

    count: Any = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        super().step()


class Logging(Own):
    def __init__(self, *args: Any, **options: Any) -> None:
        self.log: list[float] = []
        super().__init__(*args, **options)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.log.append(len(self.log) / 2)
        super().step()


class Keeping(Own):
    """Momenta that are not in the state."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.momenta: dict[Tensor, Tensor] = {}
        super().__init__(*args, **options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.momenta.setdefault(p, torch.zeros_like(p)).mul_(0.9).add_(p.grad)
                p.add_(momentum, alpha=-group["lr"])


class Averaging(Own):
    """One mean for all parameters, in a tensor."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.mean = torch.ones(())
        super().__init__(*args, **options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.mean.mul_(0.9).add_(p.grad.mean())
                p.add_(p.grad / self.mean, alpha=-group["lr"])


class Asking(Own):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()
        super().step()


def descend(p: Tensor, g: Tensor, state: State, group: Group) -> None:
    p.add_(g, alpha=-group["lr"])


def of_class(kind: type[Own]) -> Own:
    return kind([nn.Parameter(torch.ones(SHAPE))], descend)


REFUSED = [
    (Counting, "its step changes 'count', which belongs to no parameter"),
    (Logging, "its step changes 'log', which belongs to no parameter"),
    (Keeping, "its step changes 'momenta', which belongs to no parameter"),
    (Averaging, "its step of a parameter depends on others"),
    (Asking, "it computes the loss itself, by a closure"),
]


@pytest.mark.parametrize(("kind", "reason"), REFUSED)
def test_refused_with_the_reason_and_left_as_it_was(kind: type[Own], reason: str) -> None:
    optimizer = of_class(kind)
    with pytest.raises(NotCaptured) as error:
        update_of(optimizer)
    assert str(error.value).startswith(reason)
    assert getattr(optimizer, "count", 0) == 0
    assert getattr(optimizer, "log", []) == [] and getattr(optimizer, "momenta", {}) == {}
    assert float(getattr(optimizer, "mean", 1.0)) == 1.0


def test_a_user_is_told_the_class_and_what_to_do() -> None:
    optimizer = of_class(Counting)
    with pytest.raises(ValueError, match=r"Counting cannot be captured: .*'count'.* Use it as it is"):
        CapturedUpdates(optimizer).of(SHAPE, optimizer.param_groups[0])


def test_an_attribute_that_is_only_read_is_part_of_the_graph() -> None:
    """And one that changes between steps captures again."""

    class Scaled(Own):
        scale = 2.0

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.add_(p.grad, alpha=-group["lr"] * self.scale)

    optimizer: Any = of_class(Scaled)
    [group] = optimizer.param_groups
    updates = CapturedUpdates(optimizer)
    before = updates.of(SHAPE, group)
    optimizer.scale = 3.0
    after, numbers = updates.of(SHAPE, group), [torch.tensor(0.1, dtype=torch.float64)]
    rows = [update.of_step(numbers, torch.ones(1, dtype=torch.float64), {})[0] for update in (before, after)]
    torch.testing.assert_close(torch.cat(rows).flatten(), torch.tensor([-0.2, -0.3]))


def test_a_tensor_that_the_step_does_not_look_at_is_no_matter() -> None:
    optimizer: Any = of_class(Own)
    optimizer.seen, optimizer.kept = torch.ones(()), [torch.ones(3)]
    assert update_of(optimizer).names == ("n0",)


@pytest.mark.parametrize("label", ["AdamW", "SGD momentum", "NAdam", "Muon"])
def test_capturing_changes_nothing(label: str) -> None:
    """Neither parameters, gradients, states nor groups; nor what torch draws next."""
    optimizer = of_torch(label)
    [group] = optimizer.param_groups
    [p] = group["params"]
    p.grad = torch.full_like(p, 0.5)
    torch.manual_seed(0)
    options, drawn = dict(group), torch.random.get_rng_state()
    update_of(optimizer)
    assert not optimizer.state and dict(group) == options and torch.equal(torch.random.get_rng_state(), drawn)
    assert bool((p == 1).all()) and bool((p.grad == 0.5).all()) and p.grad_fn is None


def momentum(p: Tensor, g: Tensor, state: State, group: Group) -> None:
    state.setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(g)
    p.sub_(group["lr"] * state["m"])


SHELLS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "Lion": lambda several: optim.Lion(several, compiled=False),
    "LAMB": lambda several: optim.LAMB(several, compiled=False),
    "one's own": lambda several: fp8compile.optim.compress(Own(several, momentum), compiled=False),
}


@pytest.mark.parametrize("kind", SHELLS)
def test_what_our_shell_keeps_is_none_of_a_steps_attributes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plans and prepared steps change as parameters come and go; the step of each shape is captured once."""
    captured: list[tuple[int, ...]] = []
    plain = captured_updates.captured_update

    def noted(optimizer: torch.optim.Optimizer, group: Group, shape: tuple[int, ...]) -> Any:
        captured.append(shape)
        return plain(optimizer, group, shape)

    monkeypatch.setattr(captured_updates, "captured_update", noted)
    several: list[Tensor] = [nn.Parameter(torch.randn(rows, 128)) for rows in (32, 64)]
    optimizer = SHELLS[kind](several)
    for step in range(6):
        for i, p in enumerate(several):
            p.grad = torch.randn_like(p) if (step + i) % 3 else None
        optimizer.step()
    assert len(captured) == len({*captured})


class FromConstructor(torch.optim.Optimizer):
    """As torch's Adagrad up to 2.12: states are made with the optimizer, and its step does not make any."""

    def __init__(self, parameters: list[Tensor], lr: float = 0.1, start: float = 0.25) -> None:
        super().__init__(parameters, {"lr": lr, "start": start})
        for p in parameters:
            self.state[p]["sum"] = torch.full_like(p, start, requires_grad=False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                total = self.state[p]["sum"].addcmul_(p.grad, p.grad)
                p.addcdiv_(p.grad, total.sqrt(), value=-group["lr"])


def test_states_that_a_constructor_makes_begin_as_it_makes_them() -> None:
    optimizer = FromConstructor([nn.Parameter(torch.ones(SHAPE))])
    update = update_of(optimizer)
    assert dict(update.initial) == {"sum": 0.25} and update.first is None
