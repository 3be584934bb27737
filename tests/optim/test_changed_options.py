"""Options, groups, dtypes and the default dtype that change between steps: the next step goes by what they are then."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8compile import optim


def one(value: float = 0.0, n: int = 4) -> nn.Parameter:
    p = nn.Parameter(torch.full((n,), value))
    p.grad = torch.ones(n)
    return p


def moved(optimizer: torch.optim.Optimizer, p: Tensor) -> float:
    """By how much a step moves a parameter whose elements are alike."""
    before = p.detach().clone()
    optimizer.step()
    return float((p - before).abs().max())


def test_a_group_that_is_replaced_brings_its_own_learning_rate() -> None:
    p = one()
    optimizer = optim.SGD([p], lr=1.0, compiled=False)
    assert moved(optimizer, p) == 1.0
    for lr in (0.0, 0.5, 0.25):  # ids of groups are used again
        optimizer.param_groups = [{**group, "lr": lr} for group in optimizer.param_groups]
        assert moved(optimizer, p) == lr


def test_groups_that_are_gone_are_not_held() -> None:
    p = one()
    optimizer = optim.SGD([p], lr=1.0, compiled=False)
    for _ in range(5):
        optimizer.param_groups = [{**group} for group in optimizer.param_groups]
        optimizer.step()
    assert len(optimizer._updates._known) == 1


def test_a_parameter_that_goes_into_another_group_at_the_same_place_takes_its_learning_rate() -> None:
    p, q = one(), one()
    optimizer = optim.SGD([{"params": [p, q], "lr": 1.0}, {"params": [], "lr": 0.0}], compiled=False)
    assert moved(optimizer, q) == 1.0
    optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop())
    assert moved(optimizer, q) == 0.0
    assert moved(optimizer, p) == 1.0


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_a_tensor_that_becomes_a_zero_is_a_zero(name: str) -> None:
    p = one()
    optimizer = getattr(optim, name)([p], lr=torch.tensor(0.5), compiled=False)
    assert moved(optimizer, p) > 0
    optimizer.param_groups[0]["lr"] = 0.0
    assert moved(optimizer, p) == 0.0
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    assert moved(optimizer, p) > 0


@pytest.fixture(params=[torch.bfloat16, torch.float64], ids=str)
def another_default(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


def test_steps_and_numbers_are_fp32_whatever_the_default(another_default: torch.dtype) -> None:
    """In BF16 the count of steps would stay at 256."""
    p = nn.Parameter(torch.zeros(32, 128, dtype=torch.float32))
    p.grad = torch.ones_like(p)
    optimizer = optim.AdamW([p], lr=1e-3, compiled=False)
    optimizer.step()
    assert optimizer.state[p]["step"].dtype == torch.float32
    assert optimizer.numbers_of(p, optimizer.param_groups[0]).dtype == torch.float32
    optimizer.state[p]["step"].fill_(256)
    optimizer.step()
    assert optimizer.state[p]["step"] == 257
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state[p]["step"] == 257


@pytest.mark.parametrize("master", ["none", "split", "fp32"])
def test_a_parameter_that_becomes_bf16_is_rounded_as_one_that_was(master: str) -> None:
    """Rounded to nearest, ones that move by 2**-3 of an ulp stay for ever."""
    p = one(1.0, 4096)
    optimizer = optim.SGD([p], lr=1e-3, maximize=True, master=master, compiled=False)
    optimizer.step()
    p.data, p.grad = p.data.bfloat16(), None
    for _ in range(100):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert float(p.detach().float().mean()) == pytest.approx(1.1, abs=2.0**-8)


@pytest.mark.parametrize("make", [torch.optim.SGD, optim.SGD], ids=["torch", "ours"])
def test_momentum_that_begins_later(make: Any) -> None:
    p = one()
    optimizer = make([p], lr=1.0)
    optimizer.step()
    optimizer.param_groups[0]["momentum"] = 0.5
    optimizer.step()
    optimizer.step()
    assert torch.equal(p.detach(), torch.full((4,), -3.5))


def test_moments_stay_where_others_begin() -> None:
    p = one()
    optimizer = optim.RMSprop([p], lr=1e-2, compiled=False, state_format="fp32")
    optimizer.step()
    square = optimizer.state[p]["square_avg.fp32.value"].clone()
    optimizer.param_groups[0]["momentum"] = 0.9
    optimizer.step()
    assert optimizer.state[p]["step"] == 2 and (optimizer.state[p]["square_avg.fp32.value"] > square).all()
    assert optimizer.state[p]["momentum_buffer.fp32.value"].any()


def test_a_damped_momentum_does_not_begin_behind_the_first_step() -> None:
    """torch takes its first gradient whole; it would be damped here."""
    p = one()
    optimizer = optim.SGD([p], lr=1.0, dampening=0.5, compiled=False)
    moved(optimizer, p)
    optimizer.param_groups[0]["momentum"] = 0.9
    before = p.detach().clone()
    with pytest.raises(ValueError, match="has taken 1 steps, and an option now asks for a state"):
        moved(optimizer, p)
    assert torch.equal(p, before)
