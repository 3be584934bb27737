"""What changes behind the first call of a whole step, and what a graph with its update would get wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import fp8compile
from fp8compile.whole_step.step import TrainStep

EAGER = {"linears": "off", "saved": "off", "debug.codegen": "eager"}
X = torch.linspace(-1.0, 2.0, 32).view(4, 8)


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any = loss_fn, **options: Any) -> TrainStep:
    torch._dynamo.reset()
    return fp8compile.train_step(model, loss, optimizer, recipe=EAGER, **options)


def three_calls(model: nn.Module, optimizer: torch.optim.Optimizer, *args: Any) -> None:
    loss_fn(model, *args).backward()
    optimizer.step()
    optimizer.zero_grad()


def same(model: nn.Module, other: nn.Module) -> bool:
    """Up to FP32 rounding: torch 2.11 adds in another order."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(torch.allclose(a, b, rtol=1e-6, atol=1e-7) for a, b in pairs)


class Heads(nn.Module):
    """One of two heads, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, name: str) -> Tensor:
        found: Tensor = getattr(self, name)(x)
        return found


@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_gradients_of_other_parameters_are_taken_too(clip_norm: float | None) -> None:
    def loss(model: nn.Module, x: Tensor, name: str) -> Tensor:
        out: Tensor = model(x, name)
        return out.square().mean()

    model = Heads()
    expected = copy.deepcopy(model)
    optimizer = sgd(expected)
    step = train_step(model, sgd(model), loss, clip_norm=clip_norm)
    for accumulated, stepped in (("b", "b"), ("a", "b"), ("b", "b")):
        step.accumulate(X, accumulated)
        step(X + 1, stepped)
        loss(expected, X, accumulated).backward()
        loss(expected, X + 1, stepped).backward()
        if clip_norm:
            nn.utils.clip_grad_norm_(expected.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        assert same(model, expected)
        assert all(p.grad is None for p in model.parameters())
    assert step.summary.is_one_graph


class Seen(nn.Module):
    """The backward reads another name of a weight that is updated."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("mid", self.last.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(nn.functional.linear(self.first(x), self.mid))
        return found


def test_memory_that_an_update_shares_with_what_else_is_read() -> None:
    model = Seen()
    expected = Seen()
    expected.load_state_dict(model.state_dict())
    step, optimizer = train_step(model, sgd(model)), sgd(expected)
    for _ in range(2):
        step(X)
        three_calls(expected, optimizer, X)
    assert "shares memory with another input" in str(step.summary)
    assert same(model, expected)


def test_empty_parameters_share_no_memory() -> None:
    model = nn.Linear(8, 8)
    model.more = nn.ParameterList([torch.empty(0), torch.empty(0)])
    step = train_step(model, sgd(model), lambda m, x: loss_fn(m, x) + sum(p.sum() for p in m.more), fallback=False)
    step(X)
    assert step.summary.is_one_graph


def branches(model: nn.Module, x: Tensor) -> Tensor:
    loss = loss_fn(model, x)
    return loss * 2 if loss.item() > 0 else loss


@pytest.mark.parametrize("loss", [branches])
def test_a_loss_that_reads_its_value_falls_back(loss: Callable[..., Tensor]) -> None:
    model = nn.Linear(8, 8)
    expected = copy.deepcopy(model)
    step, optimizer = train_step(model, sgd(model), loss), sgd(expected)
    step(X)
    loss(expected, X).backward()
    optimizer.step()
    assert "Dynamo captures no single graph" in str(step.summary)
    assert same(model, expected)


def test_more_graphs_than_dynamos_limit_fall_back() -> None:
    model = nn.Linear(8, 8)
    with mock.patch.object(torch._dynamo.config, "recompile_limit", 2):
        step = train_step(model, sgd(model), dynamic=False)
        for rows in (1, 2, 3, 4):
            before = model.weight.clone()
            step(X[:rows])
            assert not torch.equal(model.weight, before)
    assert "Dynamo captures no single graph" in str(step.summary)


def test_groups_that_are_added_count_against_no_limit() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with mock.patch.object(torch._dynamo.config, "recompile_limit", 2):
        step = train_step(model, optimizer, fallback=False)
        for layer in model[1:]:
            step(X)
            optimizer.add_param_group({"params": [*layer.parameters()]})
        before = model[3].weight.clone()
        step(X)
    assert not torch.equal(model[3].weight, before)


def test_other_parameters_of_the_same_number() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    expected = copy.deepcopy(model)
    first, second = (torch.optim.SGD(m[0].parameters(), lr=0.1) for m in (model, expected))
    step = train_step(model, first, fallback=False)
    for layer in (0, 1):
        for m, optimizer in ((model, first), (expected, second)):
            optimizer.param_groups[0]["params"] = [*m[layer].parameters()]
        step(X)
        loss_fn(expected, X).backward()
        second.step()
        expected.zero_grad()
        assert same(model, expected)


def hooked_weight(model: nn.Module, optimizer: torch.optim.Optimizer, called: list[int]) -> Any:
    return model.weight.register_hook(lambda gradient: called.append(1) or gradient * 0)  # type: ignore[union-attr]


def hooked_step(model: nn.Module, optimizer: torch.optim.Optimizer, called: list[int]) -> Any:
    return optimizer.register_step_post_hook(lambda *_: called.append(1))


def hooked_steps(model: nn.Module, optimizer: torch.optim.Optimizer, called: list[int]) -> Any:
    return register_optimizer_step_post_hook(lambda *_: called.append(1))


@pytest.mark.parametrize("hook", [hooked_weight, hooked_step, hooked_steps])
def test_a_hook_behind_the_first_step_is_called(hook: Callable[..., Any]) -> None:
    model = nn.Linear(8, 8)
    optimizer = sgd(model)
    step = train_step(model, optimizer)
    step(X)
    assert step.summary.is_one_graph
    called: list[int] = []
    handle = hook(model, optimizer, called)
    try:
        step(X)
    finally:
        handle.remove()
    assert called and "hooks" in str(step.summary)


def test_a_dtype_that_an_optimizer_is_not_for() -> None:
    model = nn.Linear(8, 8)
    step = train_step(model, sgd(model))
    step(X)
    assert step.summary.is_one_graph
    model.bfloat16()
    step(X.bfloat16())
    assert "use fp8compile.optim" in str(step.summary)


def test_autocast_around_a_step_is_the_losses_alone() -> None:
    class Exact(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return super().forward(x)

    model = Exact(8, 8)
    expected = copy.deepcopy(model)
    step, optimizer = train_step(model, sgd(model), fallback=False), sgd(expected)
    calls = fp8compile.train_step(expected, loss_fn, optimizer, recipe=EAGER)
    with torch.autocast("cpu", torch.bfloat16):
        step(X)
        calls.accumulate(X)
    optimizer.step()
    assert same(model, expected)


def test_a_batch_with_a_gradient_has_it() -> None:
    model = nn.Linear(8, 8)
    step, x = train_step(model, sgd(model)), X.clone().requires_grad_()
    step(x)
    assert x.grad is not None and "is no parameter has a gradient" in str(step.summary)
