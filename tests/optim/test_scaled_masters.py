"""``master="fp16_scaled"``: bytes, what it refuses, checkpoints from and to other masters, and that small steps add up."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fp8compile import optim
from fp8compile.optim.code_writer import why_not_rounded
from fp8compile.optim.step_codes import Wanted

BF16 = torch.bfloat16


def stepped(master: str, steps: int = 3, shape: tuple[int, int] = (16, 128)) -> tuple[nn.Parameter, optim.AdamW]:
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(shape).to(BF16))
    optimizer = optim.AdamW([("w", p)], lr=1e-2, master=master, compiled=False)
    for _ in range(steps):
        p.grad = torch.randn(shape).to(BF16)
        optimizer.step()
    return p, optimizer


def master_of(p: nn.Parameter, optimizer: optim.AdamW) -> torch.Tensor:
    state = optimizer.state[p]
    return state["master_fp16"].float() * state["master_inv_scale"] if "master_fp16" in state else state["master"]


def test_two_bytes_an_element_and_four_a_tensor() -> None:
    p, optimizer = stepped("fp16_scaled")
    _, none = stepped("none")
    assert optimizer.report().nbytes - none.report().nbytes == 2 * p.numel() + 4
    [row] = optimizer.report().parameters
    assert {s.name: s.nbytes for s in row.states if "master" in s.name} == {
        "master_fp16": 2 * p.numel(),
        "master_inv_scale": 4,
    }


def test_the_weight_is_the_nearest_to_its_master() -> None:
    p, optimizer = stepped("fp16_scaled")
    assert torch.equal(p.detach(), master_of(p, optimizer).to(BF16))


def test_steps_too_small_for_the_weight_add_up() -> None:
    """800 steps of 2**-14 on a weight of 1: BF16 is spaced 2**-8 below 1, FP16 by 2**-11; their sum is 0.0488.

    Each is rounded to one of two numbers 2**-11 apart, unbiased: Hoeffding, 4 deviations of 800 draws of 512 weights.
    """
    p = nn.Parameter(torch.ones(4, 128, dtype=BF16))
    optimizer = optim.SGD([("w", p)], lr=2.0**-14, master="fp16_scaled", compiled=False)
    for _ in range(800):
        p.grad = torch.ones_like(p)
        optimizer.step()
    moved = 1 - float(optimizer.state[p]["master_fp16"].double().mean() * optimizer.state[p]["master_inv_scale"])
    assert abs(moved - 800 * 2.0**-14) <= 4 * 2.0**-11 * 800**0.5 / 2 / 512**0.5
    assert float(p.detach().float().mean()) < 0.97


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_weight_that_is_not_finite_is_refused_and_nothing_changes(value: float) -> None:
    p = nn.Parameter(torch.ones(4, 128, dtype=BF16))
    with torch.no_grad():
        p[1, 5] = value
    optimizer = optim.AdamW([("w", p)], master="fp16_scaled", compiled=False)
    p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match="NaN or inf"):
        optimizer.step()
    assert not optimizer.state.get(p)


def test_fp32_parameters_keep_none() -> None:
    p = nn.Parameter(torch.ones(4, 128))
    optimizer = optim.AdamW([("w", p)], master="fp16_scaled", compiled=False)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert not any("master" in name for name in optimizer.state[p])


@pytest.mark.parametrize("source", ["fp32", "split", "none"])
def test_another_master_is_converted_within_its_bound(source: str) -> None:
    p, optimizer = stepped(source)
    exact = optimizer.plan_of(p, optimizer.param_groups[0])._precise({"param": p.detach(), **optimizer.state[p]})
    ours = optim.AdamW([("w", p)], lr=1e-2, master="fp16_scaled", compiled=False)
    ours.load_state_dict(optimizer.state_dict())
    inv_scale = ours.state[p]["master_inv_scale"]
    bound = torch.maximum(exact.abs() * 2.0**-11, inv_scale * 2.0**-25)
    assert ((master_of(p, ours) - exact).abs() <= bound).all()


@pytest.mark.parametrize("wanted", ["fp32", "split"])
def test_it_is_converted_to_another_master(wanted: str) -> None:
    """Exactly to FP32; to a split weight of 16 bits, exactly too where the weight is the one that split would choose."""
    p, optimizer = stepped("fp16_scaled")
    exact = master_of(p, optimizer)
    other = optim.AdamW([("w", p)], lr=1e-2, master=wanted, compiled=False)
    other.load_state_dict(optimizer.state_dict())
    found = other.plan_of(p, other.param_groups[0])._precise({"param": p.detach(), **other.state[p]})
    assert ((found - exact).abs() <= (0 if wanted == "fp32" else exact.abs() * 2.0**-15)).all()


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("master_inv_scale", torch.tensor(0.3), "power of two"),
        ("master_inv_scale", torch.zeros(2), "one number"),
        ("master_inv_scale", None, "one number"),
        ("master_fp16", torch.full((16, 128), math.inf).half(), "NaN or inf"),
        ("master_fp16", torch.zeros(3).half(), "fits the parameter"),
    ],
)
def test_a_damaged_state_is_refused(key: str, value: torch.Tensor | None, reason: str) -> None:
    p, optimizer = stepped("fp16_scaled")
    saved = optimizer.state_dict()
    saved["state"][0] = {**saved["state"][0], key: value}
    if value is None:
        del saved["state"][0][key]
    before = {name: t.clone() for name, t in optimizer.state[p].items()}
    with pytest.raises(ValueError, match=reason):
        optimizer.load_state_dict(saved)
    assert all(torch.equal(t, before[name]) for name, t in optimizer.state[p].items())


@pytest.mark.parametrize(
    ("dtype", "master", "refused"),
    [
        (torch.float16, "fp16_scaled", True),
        (torch.float16, "fp32", True),
        (torch.bfloat16, "fp16_scaled", False),
        (torch.bfloat16, "none", False),
    ],
)
def test_codes_of_weights_are_left_to_graphs_where_a_cast_may_be_dropped(
    dtype: torch.dtype, master: str, refused: bool
) -> None:
    """Inductor may drop a cast to FP16 and back, and encode what the weight was rounded from."""
    optimizer = optim.AdamW([nn.Parameter(torch.ones(4, 128, dtype=dtype))], master=master, compiled=False)
    [p] = optimizer.param_groups[0]["params"]
    reason = why_not_rounded(optimizer.plan_of(p, optimizer.param_groups[0]), Wanted(dtype, True, False))
    assert (reason is not None and master in reason) is refused
