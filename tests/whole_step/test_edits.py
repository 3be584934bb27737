"""Weights of 16 bits that are changed between whole steps, under masters: as between the three calls, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8compile

EAGER = {"linears": "off", "saved": "off", "debug.codegen": "eager"}


def loss_fn(model: nn.Module, x: Tensor, words: Tensor) -> Tensor:
    return F.cross_entropy(model(x).float(), words)


def run(model: nn.Module, *, whole: bool, master: str) -> list[dict[str, Tensor]]:
    """The weights behind each of 6 steps; clamped before the third, as they were loaded before the fifth."""
    optimizer = fp8compile.optim.SGD(model, lr=2.0**-10, master=master, compiled=False)
    step = fp8compile.train_step(model, loss_fn, optimizer, recipe=EAGER, fallback=False)
    compiled = torch.compile(lambda *batch: loss_fn(model, *batch), backend="fp8compile", options=EAGER)
    first, found = copy.deepcopy(model.state_dict()), []
    generator = torch.Generator().manual_seed(0)
    for number in range(6):
        batch = torch.randn(12, 16, generator=generator).bfloat16(), torch.randint(0, 8, (12,), generator=generator)
        if number == 2:
            with torch.no_grad():
                torch._foreach_clamp_max_([*model.parameters()], 0.0)
        if number == 4:
            model.load_state_dict(first)
        if whole:
            step(*batch)
        else:
            compiled(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(copy.deepcopy(model.state_dict()))
    return [first, *found]


@pytest.mark.parametrize("master", ["fp32", "fp16_scaled"])
def test_edits_between_whole_steps_stay(master: str) -> None:
    """A step is 2**-10 of a gradient, which is below 256 here: edits are far larger."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 8)).bfloat16()
    with torch.no_grad():
        torch._foreach_mul_([*model.parameters()], 4.0)
    theirs = run(copy.deepcopy(model), whole=False, master=master)
    torch._dynamo.reset()
    mine = run(model, whole=True, master=master)
    for ours, other in zip(mine, theirs, strict=True):
        assert all(torch.equal(ours[name], other[name]) for name in other)
    first, *_, behind_loading, _ = mine
    weight = "2.weight"
    assert float((behind_loading[weight] - first[weight]).abs().max()) <= 0.25
    assert float((mine[2][weight] - first[weight]).abs().max()) > 0
    assert float(mine[3][weight].float().max()) <= 0.25 < float(first[weight].float().max())
