"""What a step's line says of FP8 operands and of optimizer states, against the numbers themselves."""

from __future__ import annotations

import copy
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from fp8compile.extras.watching import states
from fp8compile.extras.watching.operands import OperandCollector
from fp8compile.extras.watching.states import Sampler
from tests.support.measure import compiled
from tests.support.written import steps_of

SIZE, ROWS = 32, 24
DELAYED = {"linears.scaling": "delayed", "linears.emulate": True, "saved": "off", "linears.amax_history_len": 4}


def data(times: float = 1.0) -> Tensor:
    return torch.randn(ROWS, SIZE, generator=torch.Generator().manual_seed(1)) * times


def test_clipped_operands_under_delayed_scaling(tmp_path: Path) -> None:
    """A batch 1000 times larger is clipped: its amax under the scale of the batches before lies above the largest number.

    The next step measures its scales and has no headroom to tell.
    """
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.GELU(), nn.Linear(SIZE, SIZE))
    run, optimizer = compiled(model, **DELAYED), torch.optim.SGD(model.parameters(), 0.0)
    totals = list[Tensor]()
    with fp8compile.extras.watching.watch(run, None, optimizer, tmp_path):  # type: ignore[arg-type]
        for times in (1.0, 1.0, 1000.0, 1000.0, 1000.0):
            run(data(times)).square().mean().backward()
            ((_, each),) = fp8compile.tools.scaling_state(model).graphs
            totals.append(each.totals.clone())
            optimizer.step()
    steps = steps_of(tmp_path)
    assert "fp8_headroom" not in steps[0], "its graph was not there when it began"
    assert "fp8_headroom" not in steps[3], "it measured"
    assert steps[1]["fp8_headroom"] == pytest.approx(1, abs=1e-6), "as large as before, under Recipe.linears.margin"
    assert steps[4]["fp8_headroom"] == pytest.approx(1, abs=1e-6)
    assert steps[2]["fp8_headroom"] == pytest.approx(-math.log2(1000) + steps[1]["fp8_headroom"], abs=1e-3)
    assert steps[2]["nearest_fp8"] == "0.input"
    added = [b - a for a, b in itertools.pairwise(totals)]
    assert [step["clipped"] for step in steps[1:]] == [int(each[:, 0].sum()) for each in added]
    assert [step["fell_back"] for step in steps[1:]] == [int(each[:, 2].sum()) for each in added]
    assert steps[2]["clipped"] > ROWS * SIZE / 2 and steps[2]["fell_back"] >= 1


def test_without_delayed_scaling_nothing_is_said_of_operands() -> None:
    assert OperandCollector.read(OperandCollector(nn.Linear(2, 2)).collect()) == {}


def adamw(count: int = 2, **options: Any) -> tuple[list[nn.Parameter], fp8compile.optim.AdamW]:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(16, 256, generator=generator)) for _ in range(count)]
    optimizer = fp8compile.optim.AdamW(parameters, lr=1e-2, **options)
    optimizer.compiled = False
    return parameters, optimizer


def step(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, seed: int) -> None:
    for each in parameters:
        each.grad = torch.randn(each.shape, generator=torch.Generator().manual_seed(seed))
    optimizer.step()


def moments(optimizer: fp8compile.optim.AdamW) -> dict[str, Tensor]:
    """The states of parameter 0 as they are stored, in FP32."""
    state = optimizer.export_fp32_state_dict()["state"][0]
    return {name: state[name].clone() for name in ("exp_avg", "exp_avg_sq")}


def test_the_sampled_sqnr_is_that_of_what_the_step_stores() -> None:
    """An exact AdamW beside it, from the decoded states: its new moments less those that are stored.

    The sample sums in another order, so that both are equal to some 1e-6 of their size: 1e-5 dB, and a thousandth is asked.
    """
    (parameter,), optimizer = adamw(1)
    step([parameter], optimizer, 0)
    before = moments(optimizer)
    parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    sample = Sampler(1).sample(10, optimizer)
    assert sample is not None
    found = sample.read()["sqnr"]
    optimizer.step()
    exact = {
        "exp_avg": before["exp_avg"].double() * 0.9 + parameter.grad.double() * 0.1,
        "exp_avg_sq": before["exp_avg_sq"].double() * 0.999 + parameter.grad.double() ** 2 * 0.001,
    }
    for name, value in exact.items():
        error = value - moments(optimizer)[name].double()
        assert found[name] == pytest.approx(20 * math.log10(float(value.norm() / error.norm())), abs=1e-3)


def test_a_sample_changes_no_bit() -> None:
    (mine, one), (theirs, other) = adamw(), adamw()
    for seed in range(3):
        for each in mine:
            each.grad = torch.randn(each.shape, generator=torch.Generator().manual_seed(seed))
        if seed:
            assert Sampler(1).sample(10 + seed, one) is not None
        step(mine, one, seed)
        step(theirs, other, seed)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_parameters_are_sampled_in_turn_and_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters, optimizer = adamw(2)
    step(parameters, optimizer, 0)
    monkeypatch.setattr(states, "SHARE", math.inf)  # as if a sample took no time
    sampler = Sampler(3)
    taken = [(n, each.parameter) for n in range(1, 12) if (each := sampler.sample(n, optimizer)) is not None]
    assert taken == [(3, "parameter 0"), (6, "parameter 1"), (9, "parameter 0")]


def test_a_sample_that_takes_long_makes_the_next_one_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 2 s in steps of 1 s at a share of 1/500: the next is 1000 steps later."""
    parameters, optimizer = adamw(1)
    step(parameters, optimizer, 0)
    sampler, now = Sampler(1), [0.0]
    monkeypatch.setattr(states.time, "perf_counter", lambda: now[0])
    take = sampler._take
    monkeypatch.setattr(sampler, "_take", lambda each: (now.__setitem__(0, now[0] + 2), take(each))[1])
    sampler._next = 11
    taken = []
    for n in range(1, 1100):
        now[0] += 1
        if sampler.sample(n, optimizer) is not None:
            taken.append(n)
    assert taken == [11, 1011]


def test_states_that_are_exact_or_of_torch_are_not_sampled() -> None:
    parameters, optimizer = adamw(1, state_format="fp32")
    stock = torch.optim.AdamW(copy.deepcopy(parameters))
    step(parameters, optimizer, 0)
    assert Sampler(1).sample(10, optimizer) is None and Sampler(1).sample(10, stock) is None
