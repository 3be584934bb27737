"""Weights that are changed between steps, or loaded, under each kind of master: the change stays, and low bits do too."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from fp8compile import optim
from fp8compile._distributed import local_part
from fp8compile.optim import edits
from tests.support.checkpoints import Net, everything, of, raw, through_a_file, train
from tests.support.ranks import on_ranks
from tests.support.sharded import placed

BF16, FP16 = torch.bfloat16, torch.float16
COPIES = ("fp32", "fp16_scaled")
MASTERS = ("none", "split", *COPIES)


def stepped(p: nn.Parameter, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        p.grad = torch.ones_like(p)
        optimizer.step()


def sgd(master: str, *, start: float = 1.0, compiled: bool = False) -> tuple[nn.Parameter, optim.SGD]:
    """A weight that has taken 3 steps of 1e-3, of which BF16 keeps no single one."""
    p = nn.Parameter(torch.full((8, 128), start, dtype=BF16))
    optimizer = optim.SGD([p], lr=1e-3, master=master, compiled=compiled)
    stepped(p, optimizer, 3)
    return p, optimizer


def precise(p: nn.Parameter, optimizer: optim.EncodedOptimizer) -> torch.Tensor:
    plan = optimizer.plan_of(p, optimizer.param_groups[0])
    return plan._precise({"param": p.detach(), **optimizer.state[p]}).clone()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("master", MASTERS)
def test_an_edit_between_steps_stays(master: str, compiled: bool) -> None:
    """A step of 1e-3 moves a weight at 5, where BF16 is spaced 2**-5 below and above, by one place at most."""
    p, optimizer = sgd(master, compiled=compiled)
    with torch.no_grad():
        p.fill_(5.0)
    stepped(p, optimizer)
    assert float((p.detach().float() - 5).abs().max()) <= 2.0**-5


@pytest.mark.parametrize("master", COPIES)
def test_where_nothing_was_edited_the_low_bits_are_kept(master: str) -> None:
    p, optimizer = sgd(master)
    before = precise(p, optimizer)
    assert not torch.equal(before, p.detach().float())
    with torch.no_grad():
        p[0] = 5.0
    optimizer.step_function(p)
    after = precise(p, optimizer)
    assert torch.equal(after[1:], before[1:]) and bool((after[0] == 5).all())


@pytest.mark.parametrize("master", COPIES)
def test_best_weights_may_be_loaded_behind_training(master: str) -> None:
    p, optimizer = sgd(master)
    stepped(p, optimizer, 20)
    holder = nn.ParameterList([p])
    best = {"0": torch.full_like(p.detach(), 6.0)}
    holder.load_state_dict(best)
    optimizer.param_groups[0]["lr"] = 1e-4
    stepped(p, optimizer)
    assert float((precise(p, optimizer) - 6).abs().max()) <= 2 * max(1e-4, 6 * 2.0**-11)


def begun(steps: int, master: str, dtype: torch.dtype, compiled: bool) -> tuple[nn.ParameterList, optim.AdamW]:
    net = nn.ParameterList([nn.Parameter(torch.randn(8, 128, generator=torch.Generator().manual_seed(0)).to(dtype))])
    optimizer = optim.AdamW(net, lr=1e-3, master=master, compiled=compiled)
    train(net, optimizer, steps)
    return net, optimizer


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("master", COPIES)
def test_a_resumed_run_is_equal_to_the_bit_in_either_order(master: str, dtype: torch.dtype, compiled: bool) -> None:
    net, optimizer = begun(3, master, dtype, compiled)
    saved = through_a_file(net.state_dict()), through_a_file(optimizer.state_dict())
    train(net, optimizer, 2, seed=2)
    for model_first in (True, False):
        other, resumed = begun(1, master, dtype, compiled)
        pairs: list[tuple[Any, Any]] = [*zip((other, resumed), saved, strict=True)]
        for target, state_dict in pairs if model_first else reversed(pairs):
            target.load_state_dict(state_dict)
        train(other, resumed, 2, seed=2)
        assert everything(net, optimizer) == everything(other, resumed)


@pytest.mark.parametrize("master", COPIES)
def test_a_state_loaded_before_other_weights_does_not_undo_them(master: str) -> None:
    source, trained = sgd(master, start=2.0)
    p = nn.Parameter(torch.full_like(source.detach(), 2.0))
    optimizer = optim.SGD([p], lr=1e-3, master=master, compiled=False)
    optimizer.load_state_dict(trained.state_dict())
    nn.ParameterList([p]).load_state_dict({"0": torch.full_like(p.detach(), 1.0)})
    stepped(p, optimizer)
    assert float((p.detach().float() - 1).abs().max()) <= 2.0**-8


@pytest.mark.parametrize("master", COPIES)
def test_weights_are_compared_only_behind_an_edit(master: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p, optimizer = sgd(master)
    compared: list[Any] = []
    monkeypatch.setattr(edits, "follow", lambda p, state: compared.append(p))
    stepped(p, optimizer, 2)
    assert not compared
    with torch.no_grad():
        p.clamp_(max=0.5)
    stepped(p, optimizer, 2)
    assert len(compared) == 1 and compared[0] is p


@pytest.mark.parametrize("master", COPIES)
def test_nan_is_not_taken_back(master: str) -> None:
    p, optimizer = sgd(master)
    with torch.no_grad():
        p[0, 0] = math.nan
    stepped(p, optimizer)
    assert p.isnan().sum() == 1 and bool(p[0, 0].isnan())


def test_a_weight_past_the_scale_of_its_master_gets_another_scale() -> None:
    """1 is kept under 2**-4, which reaches to 4094; 2**14 needs more. What was not edited stays within the new bound."""
    p, optimizer = sgd("fp16_scaled")
    before, scale = precise(p, optimizer), optimizer.state[p]["master_inv_scale"]
    with torch.no_grad():
        p[0] = 2.0**14
    optimizer.step_function(p)
    after = precise(p, optimizer)
    assert scale is optimizer.state[p]["master_inv_scale"] and float(scale) == 2.0**10
    assert bool((after[0] == 2.0**14).all())
    assert bool(((after - before)[1:].abs() <= 2.0**-25 * scale).all())


@pytest.mark.parametrize("master", COPIES)
def test_a_copy_follows_edits_of_its_own(master: str) -> None:
    p, optimizer = sgd(master)
    other, twin = copy.deepcopy((p, optimizer))
    with torch.no_grad():
        other.fill_(5.0)
    stepped(other, twin)
    stepped(p, optimizer)
    assert float(other.detach().float().min()) > 4.9 and float(p.detach().float().max()) < 1.1


def edited_shards() -> None:
    for master in COPIES:
        for edit in ("whole", "part"):
            p = nn.Parameter(placed(Shard(0)).to(BF16))
            optimizer = optim.SGD([p], lr=1e-3, master=master, compiled=False)
            stepped(p, optimizer)
            with torch.no_grad():
                (p if edit == "whole" else local_part(p)).fill_(5.0)
            stepped(p, optimizer)
            assert isinstance(p, DTensor)
            assert float((p.to_local().float() - 5).abs().max()) <= 2.0**-5, (master, edit)


def test_shards_may_be_edited() -> None:
    on_ranks(2, edited_shards)


def test_gradient_release_keeps_edits() -> None:
    net = Net(BF16)
    optimizer = of("SGD", net, master="fp32")
    release = optimizer.release_gradients(net)
    for value in (1.0, 5.0):
        with torch.no_grad():
            net.weight.fill_(value)
        sum(p.float().sum() for p in net.parameters()).backward()  # type: ignore[union-attr]
    release.remove()
    assert float((net.weight.detach().float() - 5).abs().max()) <= 2.0**-5
    assert raw(net.weight.detach()) == raw(optimizer.state[net.weight]["master"].to(BF16))
