"""States that come from torch.optim or go to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8compile import optim
from fp8compile.optim.compress import compress
from tests.support.checkpoints import STOCK, UNCORRECTED, Net, decoded, of, raw, stock, through_a_file, train, trained


@pytest.mark.parametrize("kind", STOCK)
def test_a_state_of_torch_is_encoded(kind: str) -> None:
    net = Net()
    theirs = stock(kind, net)
    train(net, theirs, 3)
    ours = of(kind, Net())
    ours.load_state_dict(through_a_file(theirs.state_dict()))
    for p, q, states in zip(net.parameters(), ours.param_groups[0]["params"], decoded(ours), strict=True):
        plan = ours.plan_of(q, ours.param_groups[0])
        for name, codec in plan.codecs:
            exact = theirs.state[p][name]
            assert torch.equal(states[name], codec.decode(codec.encode(exact), exact.shape)), name
        steps = theirs.state[p].get("step")  # SGD counts none; what matters there is that it is not the first step
        assert not states or ours.state[q]["step"] == (1 if steps is None else steps)


@pytest.mark.parametrize("kind", STOCK)
def test_an_exported_state_goes_on_in_torch(kind: str) -> None:
    """One step from the same states: the fresh moments are used before they are encoded, so only FP32 roundings differ.

    The parameter is p - lr d, with d made of terms of which none is larger than ``t`` below, each rounded at most 16
    times; and p itself is rounded at most 4 times (decay, the difference, and the same in the other order). Adam's
    corrections 1 - b**t are torch's in double, ours in FP32: rounding b, and the power, moves them by at most
    2 / (1 - b) roundings (1 - b**t >= (1 - b) t b**(t - 1)), of which the root of the second halves what it gets.
    """
    roundings = 16 + (0 if kind in UNCORRECTED else 2 / (1 - 0.9) + 1 / (1 - 0.999))
    net, ours = trained(kind)
    other = Net()
    theirs = stock(kind, other)
    other.load_state_dict(net.state_dict())
    theirs.load_state_dict(through_a_file(ours.export_fp32_state_dict()))
    for p, states in zip(other.parameters(), decoded(ours), strict=True):
        assert all(torch.equal(theirs.state[p][name], exact) for name, exact in states.items())
        assert states.keys() <= theirs.state[p].keys() <= {*states, "step"}
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    train(net, ours, 1, seed=2)
    train(other, theirs, 1, seed=2)
    for (name, p), q in zip(net.named_parameters(), other.parameters(), strict=True):
        t = largest_term(kind, q, before[name], theirs.state[q])
        assert ((p - q).abs() <= 2.0**-24 * (roundings * 1e-2 * t + 4 * before[name].abs())).all(), name


def largest_term(kind: str, q: Tensor, p: Tensor, states: Mapping[str, Any]) -> Tensor:
    """A bound on the terms whose sum the step is: of each running mean its old value, its new one and the gradient."""
    assert q.grad is not None
    g = q.grad.abs() + 0.1 * p.abs()
    if kind.startswith("SGD"):
        return g + 2 * states["momentum_buffer"].abs() + g if "momentum_buffer" in states else g
    if kind in ("RMSprop", "centered"):
        mean = states["grad_avg"] ** 2 if kind == "centered" else torch.zeros(())
        spread = states["square_avg"] - mean  # rounded relative to square_avg, which is larger by the factor below
        d = g / (spread.sqrt() + 1e-8) * (states["square_avg"] + mean) / spread
        return d + 2 * states["momentum_buffer"].abs() if "momentum_buffer" in states else d
    v = states.get("max_exp_avg_sq", states["exp_avg_sq"]) / (1 - 0.999**4)
    return 3 * (states["exp_avg"].abs() + g) / (1 - 0.9**4) / (v.sqrt() + 1e-8)


def test_torch_takes_over_all_options() -> None:
    net, ours = trained()
    ours.param_groups[0]["lr"] = 0.25
    theirs = torch.optim.AdamW(net.parameters())
    keys = set(theirs.param_groups[0])
    theirs.load_state_dict(ours.export_fp32_state_dict())
    assert theirs.param_groups[0]["lr"] == 0.25
    assert set(theirs.param_groups[0]) - {"param_names"} == keys


def test_muon_and_torch() -> None:
    """torch.optim.Muon counts no steps and takes matrices only."""
    p = nn.Parameter(torch.randn(67, 130))
    ours, theirs = optim.Muon([p], compiled=False), torch.optim.Muon([p])
    p.grad = torch.randn(67, 130)
    theirs.step()
    ours.load_state_dict(theirs.state_dict())
    codec = dict(ours.plan_of(p, ours.param_groups[0]).codecs)["momentum_buffer"]
    [state] = decoded(ours)
    exact = theirs.state[p]["momentum_buffer"]
    assert torch.equal(state["momentum_buffer"], codec.decode(codec.encode(exact), exact.shape))
    theirs.load_state_dict(ours.export_fp32_state_dict())
    assert torch.equal(theirs.state[p]["momentum_buffer"], state["momentum_buffer"])
    theirs.step()


def test_a_compressed_optimizer_of_torch_reads_and_writes_the_same() -> None:
    net, optimizer = trained()
    theirs = compress(torch.optim.AdamW(net.parameters()))
    theirs.load_state_dict(optimizer.state_dict())
    other = of("AdamW", Net())
    other.load_state_dict(theirs.state_dict())
    states = [each.state_dict()["state"] for each in (optimizer, other)]
    assert raw(states[0]) == raw(states[1])


def test_adamw_stays_adamw() -> None:
    theirs, ours = stock("Adam", Net()), of("AdamW", Net())
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["decoupled_weight_decay"]
