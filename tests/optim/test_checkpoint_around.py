"""Checkpoints beside what else works on an optimizer: schedulers, hooks, copies, gradient release, a grad scaler."""

from __future__ import annotations

import copy
import math
import pickle
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8compile import optim
from fp8compile.optim.overrides import override
from tests.support.checkpoints import CODES, Net, everything, of, raw, through_a_file, train, trained


def test_a_learning_rate_may_come_back_as_a_tensor() -> None:
    net, optimizer = trained()
    optimizer.param_groups[0]["lr"] = torch.tensor(1e-2)
    other, resumed = trained()
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    for each in ((net, optimizer), (other, resumed)):
        train(*each, 2, seed=2)
    assert everything(net, optimizer) == everything(other, resumed)


@pytest.mark.parametrize("tensor_lr", [False, True])
def test_a_scheduler_goes_on_after_loading(tensor_lr: bool) -> None:
    def made() -> tuple[Net, optim.EncodedOptimizer, torch.optim.lr_scheduler.LRScheduler]:
        net = Net()
        optimizer = optim.AdamW(net, lr=torch.tensor(0.1) if tensor_lr else 0.1, compiled=False)
        return net, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=7)

    net, optimizer, scheduler = made()
    for _ in range(3):
        train(net, optimizer, 1)
        scheduler.step()
    other, resumed, after = made()
    train(other, resumed, 1)
    other.load_state_dict(net.state_dict())
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    after.load_state_dict(through_a_file(scheduler.state_dict()))
    for _ in range(2):
        for each in ((net, optimizer, scheduler), (other, resumed, after)):
            train(each[0], each[1], 1, seed=2)
            each[2].step()
    assert everything(net, optimizer) == everything(other, resumed)


def test_a_scheduler_may_begin_in_the_middle() -> None:
    _, optimizer = trained()
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    other = of("AdamW", Net())
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    torch.optim.lr_scheduler.ExponentialLR(
        other, 0.5, last_epoch=3
    )  # needs initial_lr, which the scheduler put there


def test_hooks_run_as_in_torch() -> None:
    _, optimizer = trained()
    seen: list[Any] = []

    def other_lr(opt: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        seen.append((opt, "before"))
        groups = [{**group, "lr": 0.75} for group in state_dict["param_groups"]]
        return {**state_dict, "param_groups": groups}

    saved = optimizer.state_dict()
    optimizer.register_load_state_dict_pre_hook(other_lr)
    optimizer.register_load_state_dict_pre_hook(
        lambda opt, state_dict: state_dict["param_groups"][0].pop("eps") and None
    )
    optimizer.register_load_state_dict_post_hook(lambda opt: seen.append((opt, "after")))
    optimizer.register_state_dict_post_hook(lambda opt, state_dict: {**state_dict, "extra": 1})
    optimizer.load_state_dict(saved)
    assert seen == [(optimizer, "before"), (optimizer, "after")]
    assert optimizer.param_groups[0]["lr"] == 0.75 and optimizer.param_groups[0]["eps"] == 1e-8
    assert optimizer.state_dict()["extra"] == 1 and "eps" in saved["param_groups"][0]


def test_formats_are_decided_once() -> None:
    """An override after the first step is for the next optimizer: states stay as they are stored, also through loading."""
    net, optimizer = trained()
    override(net, state_format="fp32", names=("weight",))
    optimizer.load_state_dict(optimizer.state_dict())
    train(net, optimizer, 1)
    assert CODES in optimizer.state[net.weight]
    other = of("AdamW", net)
    other.load_state_dict(optimizer.state_dict())
    assert "exp_avg.fp32.value" in other.state[net.weight]


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda pair: pickle.loads(pickle.dumps(pair)),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("started", [False, True])
def test_a_copy_trains_on_as_the_original(how: str, started: bool) -> None:
    net = Net(torch.bfloat16)
    override(net.conv, state_format="fp32")  # marked on this very parameter, of which a copy knows nothing
    optimizer = of("AdamW", net, overrides={"lo*": "dynamic_tree"}, seed=5)
    if started:
        train(net, optimizer, 2)
        override(net, state_format="fp32", names=("weight",))  # too late for this optimizer and its copies
    other, twin = COPIES[how]((net, optimizer))
    assert {id(p) for p in twin.param_groups[0]["params"]} == {id(p) for p in other.parameters()}
    for each in ((net, optimizer), (other, twin)):
        train(*each, 2, seed=2)
    assert everything(net, optimizer) == everything(other, twin)
    assert raw(twin.state[other.weight][CODES]) == raw(optimizer.state[net.weight][CODES])
    assert str(twin.report()) == str(optimizer.report())


def test_states_may_be_reset_as_in_torch() -> None:
    net, optimizer = trained()
    optimizer.__setstate__({"state": defaultdict(dict)})
    assert not optimizer.state
    other = copy.deepcopy(net)
    fresh = of("AdamW", other)
    for each in ((net, optimizer), (other, fresh)):
        train(*each, 2, seed=2)
    assert everything(net, optimizer) == everything(other, fresh)


def test_gradient_release_follows_what_was_loaded() -> None:
    net, optimizer = trained()
    release = optimizer.release_gradients(net)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.0
    saved["param_groups"][0]["weight_decay"] = 0.0
    optimizer.load_state_dict(saved)
    before = raw(dict(net.named_parameters()))
    sum(p.sum() for p in net.parameters()).backward()
    release.remove()
    assert raw(dict(net.named_parameters())) == before and net.weight.grad is None


def test_a_grad_scaler_composes() -> None:
    """The scale is a power of two, so scaling and unscaling changes no gradient; an infinite one skips the step."""
    (net, plain), (other, scaled) = trained(), trained()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def loss(of: nn.Module) -> Tensor:
        return sum((p * p.detach().round()).sum() for p in of.parameters())  # type: ignore[return-value]

    net.zero_grad()
    loss(net).backward()
    plain.step()
    other.zero_grad()
    scaler.scale(loss(other)).backward()
    scaler.step(scaled)
    scaler.update()
    assert everything(net, plain) == everything(other, scaled)
    other.zero_grad()
    scaler.scale(loss(other) * math.inf).backward()
    scaler.step(scaled)
    assert everything(net, plain) == everything(other, scaled)
