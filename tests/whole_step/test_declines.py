"""Where no whole step is possible: the reason, and the three calls in its place."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from fp8compile.whole_step import running
from fp8compile.whole_step.joined import CannotJoin

EAGER = {"linears": "off", "saved": "off", "debug.codegen": "eager"}


class Breaks(nn.Module):
    """Dynamo captures no single graph of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        torch._dynamo.graph_break()
        return x.relu()


class Squares(nn.Module):
    """Overwrites its input, which then has a gradient of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(self.weight)


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return fp8compile.optim.AdamW(model, lr=0.1, compiled=False)


def hooked(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = adamw(model)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def released() -> nn.Module:
    model = nn.Linear(8, 8)
    model.weight.register_post_accumulate_grad_hook(lambda p: None)
    return model


def shared() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight.data = model[0].weight.data
    return model


def half(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.bfloat16().parameters())


Case = tuple[Callable[[], nn.Module], Callable[[nn.Module], torch.optim.Optimizer], dict[str, Any], str]
PLAIN: Callable[[], nn.Module] = lambda: nn.Linear(8, 8)  # noqa: E731
CASES: dict[str, Case] = {
    "an optimizer that is not captured": (
        PLAIN,
        lambda m: torch.optim.Adafactor(m.parameters()),
        {},
        "Adafactor cannot be captured: its state 'row_var'",
    ),
    "a closure": (PLAIN, lambda m: torch.optim.LBFGS(m.parameters()), {}, "LBFGS cannot be captured: .* by a closure"),
    "BF16 in torch.optim": (PLAIN, half, {}, "use fp8compile.optim.AdamW, which computes in float32"),
    "hooks on the step": (PLAIN, hooked, {}, "hooks on its step"),
    "hooks on a gradient": (released, adamw, {}, "weight has hooks on its gradient"),
    "observed": (PLAIN, adamw, {"fp32.observe": True}, "statistics to fill"),
    "observed and delayed": (
        PLAIN,
        adamw,
        {"fp32.observe": True, "linears": "tensorwise", "linears.scaling": "delayed"},
        "statistics to fill",
    ),
    "a graph break": (Breaks, adamw, {}, "Dynamo captures no single graph"),
    "shared memory": (shared, adamw, {}, "share memory"),
    "no gradient": (lambda: nn.Linear(8, 8).requires_grad_(False), lambda m: adamw(nn.Linear(8, 8)), {}, "no gradient"),
    "another's parameters": (PLAIN, lambda m: adamw(nn.Linear(8, 8)), {}, "no parameter of the optimizer"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_reason_is_told(case: str) -> None:
    torch._dynamo.reset()
    make, optimizer_for, options, reason = CASES[case]
    model = make()
    optimizer = optimizer_for(model)
    with pytest.raises(ValueError, match=f"one graph is not possible: .*{reason}"):
        step = fp8compile.train_step(model, loss_fn, optimizer, recipe={**EAGER, **options}, fallback=False)
        step(torch.ones(4, 8, dtype=next(model.parameters()).dtype))


def test_sparse_gradients_are_declined() -> None:
    model = nn.Sequential(nn.Embedding(8, 8, sparse=True), nn.Linear(8, 8))
    with pytest.raises(ValueError, match="0 is an embedding with sparse gradients"):
        fp8compile.train_step(model, loss_fn, adamw(model), fallback=False)


def test_the_three_calls_run_in_its_place(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Breaks()
    expected = Breaks()
    expected.load_state_dict(model.state_dict())
    step = fp8compile.train_step(model, loss_fn, adamw(model), recipe=EAGER, clip_norm=0.1)
    optimizer = adamw(expected)
    for number in range(3):
        x = torch.full((4, 8), 1.0 + number)
        with caplog.at_level(logging.WARNING, "fp8compile"):
            loss = step(x)
        theirs = loss_fn(expected, x)
        theirs.backward()
        norm = nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(loss, theirs.detach())
        assert not loss.requires_grad
        assert torch.equal(step.grad_norm, norm)
    assert all(map(torch.equal, model.parameters(), expected.parameters()))
    assert [record.message for record in caplog.records if "by themselves" in record.message].__len__() == 1
    assert not step.summary.is_one_graph
    assert "Dynamo captures no single graph" in str(step.summary)
    assert "by themselves" in fp8compile.report(step).graphs[0].remarks[0]


def test_states_that_began_before_a_decline_count_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise CannotJoin("no code for it")

    torch._dynamo.reset()
    monkeypatch.setattr(running, "compile_whole", fails)
    model = nn.Linear(8, 8)
    expected = copy.deepcopy(model)
    first, second = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, dampening=0.5) for m in (model, expected))
    step = fp8compile.train_step(model, loss_fn, first, recipe=EAGER)
    for number in range(3):  # the first momentum is the gradient, without dampening
        x = torch.full((4, 8), 1.0 + number)
        step(x)
        loss_fn(expected, x).backward()
        second.step()
        second.zero_grad()
    assert "no code for it" in str(step.summary)
    assert all(map(torch.equal, model.parameters(), expected.parameters()))


def test_a_damped_momentum_that_is_switched_on_begins_undamped() -> None:
    torch._dynamo.reset()
    model = nn.Linear(8, 8)
    expected = copy.deepcopy(model)
    first, second = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, expected))
    step = fp8compile.train_step(model, loss_fn, first, recipe=EAGER)
    for number in range(5):
        if number == 2:
            for optimizer in (first, second):
                optimizer.param_groups[0].update(momentum=0.9, dampening=0.5)
        x = torch.full((4, 8), 1.0 + number)
        step(x)
        loss_fn(expected, x).backward()
        second.step()
        second.zero_grad()
    assert step.summary.is_one_graph
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_an_error_of_the_model_is_the_models() -> None:
    torch._dynamo.reset()
    model = nn.Linear(8, 8)
    step = fp8compile.train_step(model, loss_fn, adamw(model), recipe=EAGER)
    with pytest.raises(RuntimeError, match=r"reduction dim|cannot be multiplied"):
        step(torch.ones(4, 7))
    step(torch.ones(4, 8))
    assert step.summary.is_one_graph, "it is no reason to give up one graph"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": loss_fn}, "model is a function"),
        ({"loss_fn": None}, "loss_fn=None"),
        ({"optimizer": [1]}, "optimizer is a list"),
        ({"clip_norm": -1.0}, "clip_norm=-1.0"),
        ({"mode": "fast"}, "no mode 'fast'"),
        ({"dynamic": "yes"}, "dynamic='yes'"),
        ({"fallback": 1}, "fallback=1"),
        ({"recipe": {"linaers": "off"}}, "linears"),
        ({"model": torch.compile(nn.Linear(8, 8))}, "is compiled already"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(changed: dict[str, Any], message: str) -> None:
    model = nn.Linear(8, 8)
    arguments: dict[str, Any] = {"model": model, "loss_fn": loss_fn, "optimizer": adamw(model), **changed}
    with pytest.raises(ValueError, match=message):
        fp8compile.train_step(**arguments)


@pytest.mark.parametrize("found", [lambda m, x: {"loss": m(x).mean()}, lambda m, x: 1.0])
def test_a_loss_that_is_none_is_refused(found: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    model = nn.Linear(8, 8)
    step = fp8compile.train_step(model, found, adamw(model), recipe=EAGER)
    with pytest.raises(ValueError, match="loss_fn returned"):
        step(torch.ones(4, 8))


def test_a_loss_of_several_numbers_is_refused() -> None:
    torch._dynamo.reset()
    model = nn.Linear(8, 8)
    step = fp8compile.train_step(model, lambda m, x: m(x).mean(0), adamw(model), recipe=EAGER, fallback=False)
    with pytest.raises(ValueError, match=r"the loss has the shape \[8\]"):
        step(torch.ones(4, 8))
