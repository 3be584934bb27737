"""A step that raises is no step: weights, buffers, states, counts and gradients are what they were."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8compile
from fp8compile.whole_step.step import TrainStep

EAGER = {"linears": "off", "saved": "off", "debug.codegen": "eager"}
Make = Callable[[nn.Module], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "ours": lambda model: fp8compile.optim.AdamW(model, lr=1e-2, compiled=False),
    "torch's AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "torch's SGD": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, dampening=0.5),
}
DATA, LABELS = torch.randn(16, 16), torch.arange(16) % 8


class Net(nn.Module):
    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.a, self.b, self.breaks = nn.Linear(16, 16), nn.Linear(16, 8), breaks

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.a(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return self.b(x)  # type: ignore[no-any-return]


def loss_fn(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(x), labels)


def made(maker: str, breaks: bool = False) -> tuple[nn.Module, torch.optim.Optimizer, TrainStep]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net(breaks)
    optimizer = OPTIMIZERS[maker](model)
    return model, optimizer, fp8compile.train_step(model, loss_fn, optimizer, recipe=EAGER)


def fails(step: TrainStep) -> None:
    with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        step(DATA, LABELS + 100)


@pytest.mark.parametrize("breaks", [False, True], ids=["one graph", "three calls"])
@pytest.mark.parametrize("maker", OPTIMIZERS)
def test_failing_steps_between_others_change_nothing(maker: str, breaks: bool) -> None:
    model, optimizer, step = made(maker, breaks)
    expected, other, only = made(maker, breaks)
    for _ in range(3):
        fails(step)
        step(DATA, LABELS)
        only(DATA, LABELS)
    assert all(p.grad is None for p in model.parameters())
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=0)
    states, others = optimizer.state_dict()["state"], other.state_dict()["state"]
    assert len(states) == 4
    torch.testing.assert_close(states, others, rtol=0, atol=0)


@pytest.mark.parametrize("maker", OPTIMIZERS)
def test_no_states_begin_in_a_first_step_that_fails(maker: str) -> None:
    _, optimizer, step = made(maker)
    before = copy.deepcopy(optimizer.state_dict())
    fails(step)
    assert optimizer.state_dict() == before and not before["state"]


def test_gradients_that_were_accumulated_wait_for_a_step_that_is_done() -> None:
    model, _, step = made("ours")
    step(DATA, LABELS)
    step.accumulate(DATA, LABELS)
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    fails(step)
    assert len(before) == 4
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True) if p.grad is not None)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_it_says_that_no_gradients_are_recorded(context: Callable[[], Any]) -> None:
    _, optimizer, step = made("ours")
    with context():
        with pytest.raises(ValueError, match=r"train_step is called under torch\.no_grad\(\).*: call it outside"):
            step(DATA, LABELS)
        with pytest.raises(ValueError, match=r"train_step\.accumulate is called under torch\.no_grad\(\)"):
            step.accumulate(DATA, LABELS)
    assert not optimizer.state
