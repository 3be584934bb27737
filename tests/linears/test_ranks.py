"""Delayed scaling on two ranks: each has scales of its own, until they agree on the largest amaxes.

Ranks that agree have equal scales whatever each of them ran: zeros, nothing, or several micro-batches.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fp8compile
from fp8compile.linears.history import Histories
from tests.support.measure import compiled
from tests.support.ranks import on_ranks

OPTIONS = {"linears.emulate": True, "saved": "off", "linears.scaling": "delayed", "linears.amax_history_len": 4}


class Told(NamedTuple):
    newest: dict[str, float]
    inv_scales: list[float]
    measures: bool


def told(model: nn.Module) -> Told:
    ((labels, each),) = fp8compile.tools.scaling_state(model).graphs
    measures = bool(each._measures_next)  # asked of the next step, not instead of it
    return Told(dict(zip(labels, each.amaxes[:, 0].tolist(), strict=True)), each.inv_scales.tolist(), measures)


def batch(step: int, rank: int, rows: int = 16) -> Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(10 * step + rank))


def trained() -> list[Told]:
    """After each of four steps the newest amaxes, and whether the next step measures; ranks agree in the last two."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    model = DistributedDataParallel(compiled(inner, **OPTIONS))
    found = []
    for step in range(4):
        x = batch(step, rank, 16 + 8 * rank)
        x *= 1000 if (rank, step) == (0, 2) else 1  # rank 0 clips, so both are to measure
        model(x).square().mean().backward()
        if step >= 2:
            fp8compile.tools.scaling_state(inner).all_reduce()
        found.append(told(inner))
    return found


def test_ranks_that_agree_have_the_same_scales_and_measure_together() -> None:
    zero, one = on_ranks(2, trained)
    for step in (0, 1):
        assert zero[step].newest["0.input"] != one[step].newest["0.input"], "each its own data"
        assert zero[step].newest["0.weight"] == one[step].newest["0.weight"], "replicated weights are equal anyway"
    for step in (2, 3):
        assert zero[step] == one[step]
    assert zero[2].measures and not zero[3].measures
    assert zero[2].newest["0.input"] > 1000


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor, used: Tensor) -> Tensor:
        x = self.first(x)
        y: Tensor = x + used * self.b(torch.tanh(self.a(used * x)))
        return y


# What each rank runs in each pass: a micro-batch a number, by which its expert's input is multiplied.
USES: dict[str, list[tuple[list[float], list[float]]]] = {
    "zeros on one rank": [([1], [1]), ([1], [0]), ([1], [0]), ([0], [0]), ([0], [1])],
    "zeros on one rank from the start": [([1], [0]), ([1], [0]), ([1], [0])],
    "zeros on all ranks": [([0], [0]), ([0], [0]), ([0], [1]), ([1], [0])],
    "no pass on one rank": [([1], [1]), ([1], []), ([50], []), ([1], []), ([1], [1])],
    "no pass on one rank from the second on": [([1], [1]), ([1], []), ([100], []), ([1], []), ([1], [])],
    "no pass on all ranks": [([1], [1]), ([], []), ([1], [1])],
    "micro-batches": [([1, 2], [1]), ([1], [3, 1, 1]), ([60, 1], [1])],
}


def used(uses: list[tuple[list[float], list[float]]]) -> list[tuple[list[Told], list[list[float]]]]:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Gated()
    run = compiled(model, **OPTIONS)
    found = []
    for step, each in enumerate(uses):
        for micro, factor in enumerate(each[rank]):
            run(batch(step + 100 * micro, rank), torch.tensor(float(factor))).square().mean().backward()
        fp8compile.tools.scaling_state(model).all_reduce()
        found.append(told(model))
    return found


@pytest.mark.parametrize("name", USES)
def test_ranks_agree_whatever_each_of_them_ran(name: str) -> None:
    zero, one = on_ranks(2, used, USES[name])
    for step, (mine, other) in enumerate(zip(zero, one, strict=True)):
        assert mine == other, f"pass {step}"
        assert all(math.isfinite(s) and s > 2.0**-126 for s in mine.inv_scales)
    assert zero[-1].measures == any(f > 10 for uses in USES[name][-1] for f in uses)


def ages() -> list[float]:
    """Rank 1 sees zeros for as long as the history is, after one large value of rank 0."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Gated()
    run = compiled(model, **OPTIONS)
    for step in range(7):
        run(batch(step, rank), torch.tensor(0.0 if rank else 9.0 if step == 1 else 1.0)).square().mean().backward()
        fp8compile.tools.scaling_state(model).all_reduce()
    ((labels, each),) = fp8compile.tools.scaling_state(model).graphs
    row: list[float] = each.amaxes[labels.index("a.input")].tolist()
    return row


def test_an_agreed_history_ages_on_a_rank_of_zeros_too() -> None:
    zero, one = on_ranks(2, ages)
    assert zero == one and max(zero) < 8, "four passes have come since"


def histories_of(passes: int) -> Histories:
    model = Gated()
    run = compiled(model, **OPTIONS)
    for step in range(passes):
        run(batch(step, 0), torch.tensor(1.0)).square().mean().backward()
    ((_, each),) = fp8compile.tools.scaling_state(model).graphs
    kept.append(model)
    return each


kept: list[nn.Module] = []


def test_what_was_forgotten_before_ranks_first_agree_is_not_told() -> None:
    """A run of many passes tells its history, not the largest amax since it began."""
    each = histories_of(2)
    each.since.add(torch.full_like(each.amaxes[:, 0], 1e6), torch.zeros_like(each.fell_back))
    largest = each.amaxes.amax(1)
    each.agree(each.since.packed(each.amaxes))
    assert torch.equal(each.amaxes[:, 0], largest) and not each.amaxes[:, 1:].any()


def test_to_agree_twice_changes_nothing() -> None:
    each = histories_of(3)
    each.agree(each.since.packed(each.amaxes))
    before, scales = each.amaxes, each.inv_scales
    each.agree(each.since.packed(each.amaxes))
    assert torch.equal(each.amaxes, before) and torch.equal(each.inv_scales, scales)


def test_ranks_with_other_states_go_on_from_the_largest_of_them() -> None:
    """As after each has loaded a checkpoint of its own."""
    each, other = histories_of(2), histories_of(2)
    for one, factor in ((each, 1), (other, 3)):
        one.load(one.state() | {"amaxes": factor * one.amaxes})
    largest = torch.maximum(each.since.packed(each.amaxes), other.since.packed(other.amaxes))
    for one in (each, other):
        one.agree(largest)
    assert torch.equal(each.amaxes, other.amaxes) and torch.equal(each.inv_scales, other.inv_scales)
