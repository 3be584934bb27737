"""Compiled steps of rows that end in a short group, where an update is not cut in pieces, against uncompiled ones.

Inductor's C++ backend drops the tails of such loops (torch 2.13): states were then what the memory held, 1e37 at worst.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from fp8compile import optim

SHAPE = (90, 200)
# Relative distance of states, as norms: two libraries' ulps move some of the dithered codes to the next one. A 4-bit one is
# 2**-3 to a factor of two away.
NEAR = {"e4m3_expanded": 2.0**-4, "4bit_log": 0.5}
KINDS: list[tuple[str, torch.dtype, bool, dict[str, Any]]] = [
    ("LAMB", torch.float32, False, {}),
    ("Muon", torch.float32, False, {}),
    ("AdamW", torch.float32, True, {}),
    ("AdamW", torch.float32, True, {"state_format": "4bit_log"}),
    ("AdamW", torch.bfloat16, True, {"master": "split"}),
]


def stepped(
    name: str, dtype: torch.dtype, transposed: bool, options: dict[str, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The parameter and the decoded states after two steps."""
    generator = torch.Generator().manual_seed(0)
    shape = SHAPE[::-1] if transposed else SHAPE
    first, *gradients = (torch.randn(shape, generator=generator).to(dtype) for _ in range(3))
    p = nn.Parameter(first.t() if transposed else first)
    optimizer = getattr(optim, name)([p], **options)
    for g in gradients:
        p.grad = g.t() if transposed else g
        optimizer.step()
    states = optimizer.export_fp32_state_dict()["state"][0]
    return p.detach().float(), {key: value for key, value in states.items() if key != "step"}


def is_near(found: Tensor, expected: Tensor, within: float) -> bool:
    return bool((found - expected).norm() <= within * expected.norm())


@pytest.mark.parametrize(("name", "dtype", "transposed", "options"), KINDS)
def test_states_are_those_of_a_step_that_is_not_compiled(
    name: str, dtype: torch.dtype, transposed: bool, options: dict[str, Any]
) -> None:
    p, states = stepped(name, dtype, transposed, options)
    p_eager, states_eager = stepped(name, dtype, transposed, options | {"compiled": False})
    assert is_near(p, p_eager, 1e-5)
    for key, found in states.items():
        within = NEAR[options.get("state_format", "e4m3_expanded")] if key == "exp_avg_sq" else 1e-3
        assert is_near(found, states_eager[key], within), key


def test_states_of_a_whole_step_are_those_of_the_three_calls() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    mine, x = nn.Sequential(nn.Linear(200, 64), nn.Tanh(), nn.Linear(64, 8)), torch.randn(32, 200)
    theirs = copy.deepcopy(mine)
    made, expected = (optim.AdamW(model.parameters(), lr=1e-3, compiled=False) for model in (mine, theirs))
    step = fp8compile.train_step(mine, loss_of, made, recipe={"linears": "off", "saved": "off"}, fallback=False)
    for _ in range(3):
        step(x)
        loss_of(theirs, x).backward()
        expected.step()
        expected.zero_grad()
    assert step.summary.is_one_graph
    found, wanted = (optimizer.export_fp32_state_dict()["state"][0] for optimizer in (made, expected))
    assert is_near(found["exp_avg"], wanted["exp_avg"], 2.0**-4)
    assert is_near(found["exp_avg_sq"], wanted["exp_avg_sq"], 2.0**-3)  # the weights have parted by then


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]
