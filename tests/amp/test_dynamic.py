"""mode="dynamic" is torch.amp.GradScaler: scale, skips and parameters, step for step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fp8compile.amp import LossScaler
from fp8compile.amp.policies import Dynamic, PolicyState, UpdateStats
from tests.support.amp_models import batch, loss_of, net, sgd, train

BAD = {3: torch.inf, 17: torch.nan, 18: -torch.inf, 60: torch.inf, 61: torch.inf, 62: torch.nan, 150: -torch.inf}


def run(scaler: Any, make: Any, steps: int = 200) -> tuple[list[float], list[bool], list[torch.Tensor]]:
    """Scales, whether each step was skipped, and parameters after every step; two optimizers, one of which is hit."""
    model = net(torch.float32)
    first, second = make(model[0].parameters()), make(model[2].parameters())
    scales, skips, parameters = [], [], []
    for i in range(steps):
        before = [p.detach().clone() for p in model.parameters()]
        for optimizer in (first, second):
            optimizer.zero_grad()
        scaler.scale(loss_of(model, batch(i, torch.float32))).backward()
        if i in BAD:
            model[0].weight.grad[1, 2] = BAD[i]
        if i % 3 == 0:
            scaler.unscale_(first)
            nn.utils.clip_grad_norm_(model[0].parameters(), 0.1)
        scaler.step(first)
        scaler.step(second)
        scaler.update()
        after = [p.detach().clone() for p in model.parameters()]
        scales.append(scaler.get_scale())
        skips.append(torch.equal(before[0], after[0]))
        parameters += after
    return scales, skips, parameters


MAKERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


@pytest.mark.parametrize("optimizer", MAKERS)
def test_200_steps_equal_grad_scaler(optimizer: str) -> None:
    options = {"growth_interval": 20, "init_scale": 2.0**12, "growth_factor": 2.5, "backoff_factor": 0.3}
    theirs = run(torch.amp.GradScaler("cpu", **options), MAKERS[optimizer])
    ours = run(LossScaler("dynamic", **options), MAKERS[optimizer])
    assert ours[0] == theirs[0]
    assert ours[1] == theirs[1] and [i for i, skipped in enumerate(ours[1]) if skipped] == sorted(BAD)
    if optimizer == "fused AdamW":  # which torch divides inside its kernel, by another formula where no power of 2
        torch.testing.assert_close(ours[2], theirs[2], rtol=1e-5, atol=1e-6)
    else:
        assert all(torch.equal(a, b) for a, b in zip(ours[2], theirs[2], strict=True))
    assert len(set(ours[0])) > 5


@settings(deadline=None)
@given(
    st.floats(2.0**-20, 2.0**100, width=32), st.integers(0, 4), st.booleans(), st.floats(1.01, 1e30), st.floats(0.01, 0.99)
)  # fmt: skip
def test_the_rule_is_torchs(scale: float, since: int, found: bool, growth: float, backoff: float) -> None:
    ours = PolicyState.start(scale, torch.device("cpu"))
    ours.since.fill_(since)
    seen = UpdateStats(torch.tensor([0.0, 0.0, 0.0, float(found), 0.0], dtype=torch.float64))
    new, verdict = Dynamic(growth, backoff, 5, 0.0, torch.inf)(ours, seen)
    theirs, tracker = torch.tensor(scale), torch.tensor(since, dtype=torch.int32)
    torch._amp_update_scale_(theirs, tracker, torch.tensor(float(found)), growth, backoff, 5)
    assert (new.scale.item(), new.since.item()) == (theirs.item(), tracker.item())
    assert verdict == (-1 if found else 1)


def test_nested_outputs_and_new_scale() -> None:
    for scaler in (LossScaler("dynamic", init_scale=8.0), torch.amp.GradScaler("cpu", init_scale=8.0)):
        loss = torch.ones((), requires_grad=True)
        scaled = scaler.scale([loss, (loss * 2, [loss * 3])])
        assert scaled[0] == 8 and isinstance(scaled[1], tuple) and scaled[1][1][0] == 24
        assert [each.item() for each in scaler.scale(x for x in (loss, loss * 2))] == [8, 16]
        p = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([p], lr=1.0)
        scaler.scale(p.sum()).backward()
        scaler.unscale_(optimizer)
        scaler.update(4.0)
        assert scaler.get_scale() == 4
        with pytest.raises((ValueError, AssertionError)):
            scaler.scale(3.0)


def test_fp16_parameters_which_grad_scaler_refuses() -> None:
    model = net()
    before = [p.detach().clone() for p in model.parameters()]
    scales = train(LossScaler("dynamic", init_scale=2.0**30, growth_interval=100), model, sgd(model), range(30))
    assert scales[0] == 2.0**29 and scales[-1] < 2.0**28  # it came down
    assert all(p.isfinite().all() for p in model.parameters())
    assert not torch.equal(before[0], model[0].weight)


def test_the_ceiling_and_the_floor_hold() -> None:
    model = net(torch.float32)
    scaler = LossScaler("dynamic", init_scale=4.0, growth_interval=1, ceiling=16.0, floor=2.0)
    assert train(scaler, model, sgd(model), range(4), dtype=torch.float32) == [8, 16, 16, 16]

    def poison(i: int, model: nn.Module) -> None:
        next(model.parameters()).grad.fill_(torch.inf)  # type: ignore[union-attr]

    assert train(scaler, model, sgd(model), range(4), poison, dtype=torch.float32) == [8, 4, 2, 2]
