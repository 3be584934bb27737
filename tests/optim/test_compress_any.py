"""compress takes any element-wise optimizer: all of torch.optim with all options that its tests have, and a user's own."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.common_optimizers import optim_db

import fp8compile
from tests.support.compressing import assert_same_way, off_the_way, parameters, shapes_for, values, with_gradients

STEPS = 20
# A way with codes of E4M3 differs by this much of its length. Rounding to 4 bits is off by 2.6 % of a value, root mean square
# (1 / sqrt(12) of a step of 2**-3, of values from 1 to 2), and by less where ranges are expanded. What a momentum of 0.9 is
# off by moves a parameter by 0.9 + 0.81 + ... = 9 times that, and roundings of 20 steps add up as their root does: 40 x 2.6 %
# of one momentum. Along random gradients 20 steps go 20 times as far as one momentum is large, or further: 5 %.
ENCODED = 0.05
CLOSURE = "it computes the loss itself, by a closure"
REFUSED = {
    "Adafactor": "its state 'row_var' has neither the parameter's shape nor one number",
    "LBFGS": CLOSURE,
    "SparseAdam": "does not support dense gradients",
}
CASES: list[tuple[Any, dict[str, Any]]] = [
    (info.optim_cls, case.kwargs) for info in optim_db for case in info.optim_inputs_func(device="cpu")
]


def named(name: str) -> list[tuple[str, nn.Parameter]]:
    """Parameters by the format that their states are to have, so that one optimizer is captured for both."""
    kinds = ("exact", "encoded")
    return [(f"{kind}.{i}", p) for kind in kinds for i, p in enumerate(parameters(shapes_for(name)))]


@pytest.mark.parametrize(
    ("kind", "options"), CASES, ids=lambda v: getattr(v, "__name__", None) or "-".join(v) or "none"
)
def test_every_optimizer_of_torch_goes_the_way_it_went(kind: type[torch.optim.Optimizer], options: Any) -> None:
    name = kind.__name__
    theirs, ours = named(name), named(name)
    plain, optimizer = kind(theirs, **copy.deepcopy(options)), kind(ours, **copy.deepcopy(options))
    if name in REFUSED:
        with pytest.raises(ValueError, match=rf"torch\.optim.*{name} .*{REFUSED[name]}.*Use it"):
            fp8compile.optim.compress(optimizer)
        assert type(optimizer) is kind and not optimizer.state
        return
    fp8compile.optim.compress(optimizer, overrides={"exact.*": "fp32"}, compiled=False)
    ps, qs = ([p for _, p in each] for each in (ours, theirs))
    half, before = len(ps) // 2, values(qs)
    for step in range(STEPS):
        with_gradients(step, ps, qs)
        plain.step()
        optimizer.step()
    if name == "Muon":  # an ulp of a momentum may be another BF16 number, which its products spread
        assert off_the_way(ps[:half], qs[:half], before[:half]) <= ENCODED
    else:
        assert_same_way(ps[:half], qs[:half], before[:half], STEPS)
    assert off_the_way(ps[half:], qs[half:], before[half:]) <= ENCODED


def test_all_optimizers_of_torch_are_among_them() -> None:
    every = {name for name, kind in vars(torch.optim).items() if isinstance(kind, type)} - {"Optimizer"}
    assert every == {kind.__name__ for kind, _ in CASES}


class Own(torch.optim.Optimizer):
    """A user's own: ``one`` moves a parameter."""

    def __init__(self, params: Any, lr: float = 1e-2, momentum: float = 0.9) -> None:
        self.k = 0
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.one(p, p.grad, self.state[p], group)
        return loss

    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class SignMomentum(Own):
    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["momentum"] = torch.zeros_like(p)
        state["momentum"].lerp_(g, 1 - group["momentum"])
        p.add_(state["momentum"].sign(), alpha=-group["lr"])


class SoftSign(SignMomentum):
    """Whose way does not jump where a momentum is near zero."""

    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["momentum"] = torch.zeros_like(p)
        momentum = state["momentum"].lerp_(g, 1 - group["momentum"])
        p.addcdiv_(momentum, momentum.abs() + 0.1, value=-group["lr"])


class CountsInPython(Own):
    """Its state is a number of Python's, as in older versions of torch."""

    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["step"], state["momentum"] = 0, torch.zeros_like(p)
        state["step"] += 1
        momentum = state["momentum"].mul_(group["momentum"]).add_(g, alpha=1 - group["momentum"])
        p.add_(momentum / (1 - group["momentum"] ** state["step"]), alpha=-group["lr"])


def trained(kind: type[Own], state_format: Any) -> tuple[list[nn.Parameter], list[nn.Parameter], list[Tensor], Any]:
    theirs, ours = parameters(), parameters()
    plain, optimizer = kind(theirs), fp8compile.optim.compress(kind(ours), state_format, compiled=False)
    before = values(theirs)
    for step in range(STEPS):
        with_gradients(step, theirs, ours)
        plain.step()
        optimizer.step()
    return ours, theirs, before, optimizer


@pytest.mark.parametrize("kind", [SoftSign, CountsInPython])
def test_a_users_own_goes_the_way_it_went(kind: type[Own]) -> None:
    assert_same_way(*trained(kind, "fp32")[:3], STEPS)
    ours, theirs, before, optimizer = trained(kind, "e4m3_expanded")
    assert off_the_way(ours, theirs, before) <= ENCODED
    assert isinstance(optimizer, kind) and "momentum.e4m3_expanded.codes" in optimizer.state[ours[0]]


def test_a_sign_is_another_only_where_a_momentum_is_near_zero() -> None:
    """By a sign a parameter moves up or down. What is left of earlier roundings in a momentum of 0.9 is 2.06 x 2.6 % = 5.4 %
    of it, and that turns the sign of normally distributed ones in atan(0.054) / pi = 1.7 % of all elements, at each step."""
    ours, theirs, before, _ = trained(SignMomentum, "e4m3_expanded")
    assert_same_way(ours[2:], theirs[2:], before[2:], STEPS)  # kept whole
    for p, q in zip(ours[:2], theirs[:2], strict=True):
        turned = ((p - q).abs() / (2 * 1e-2)).detach()
        assert 0 < float(turned.mean()) <= STEPS * 0.017 and float((turned - turned.round()).abs().max()) < 1e-3


def test_a_number_of_python_is_one_again_without_compress() -> None:
    ours, _, _, optimizer = trained(CountsInPython, "fp32")
    fp8compile.optim.decompress(optimizer)
    assert [optimizer.state[p]["step"] for p in ours] == [STEPS] * len(ours)
    assert {type(optimizer.state[p]["step"]) for p in ours} == {int}
    with_gradients(0, ours)
    optimizer.step()


class Random(Own):
    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.add_(g + torch.randn_like(g), alpha=-group["lr"])


class RandomInPython(Own):
    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.add_(g, alpha=-group["lr"] * random.random())


class CountsItself(Own):
    """Steps, not in the states of parameters."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.k += 1
        return super().step(closure)

    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.add_(g, alpha=-group["lr"] / self.k)


class ByValue(Own):
    def one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.add_(g / g.norm() if g.norm() > 1 else g, alpha=-group["lr"])


class AllGradients(Own):
    """As clipping to a norm of all gradients: what one parameter's step is depends on another's gradient."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        every = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in every if p.grad is not None]).norm()
        for p in every:
            p.add_(p.grad / norm, alpha=-self.param_groups[0]["lr"])


class NeedsClosure(Own):
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        loss = closure()
        super().step()
        return loss


NOT_CAPTURED: list[tuple[type[Own], str]] = [
    (Random, "its step draws random numbers"),
    (CountsItself, "its step changes 'k', which belongs to no parameter"),
    (ByValue, "its step decides by values of tensors"),
    (NeedsClosure, CLOSURE),
    (AllGradients, "its step of a parameter depends on others"),
    (RandomInPython, "its step is not the same twice"),
]


@pytest.mark.parametrize(("kind", "reason"), NOT_CAPTURED)
def test_a_users_own_that_cannot_be_captured_is_refused_and_unchanged(kind: type[Own], reason: str) -> None:
    optimizer = kind(parameters())
    groups = [dict(group) for group in optimizer.param_groups]
    with pytest.raises(
        ValueError, match=rf"test_compress_any\.{kind.__name__} cannot be captured: .*{reason}.*Use it"
    ):
        fp8compile.optim.compress(optimizer)
    assert type(optimizer) is kind and optimizer.k == 0 and not optimizer.state
    assert optimizer.param_groups == groups
