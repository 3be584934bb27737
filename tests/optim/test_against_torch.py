"""With FP32 states every optimizer is the one in torch.optim, or its paper's where torch has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8compile import optim
from tests.support.optim_models import batches, parameters_of, small_model, train

# Given the same gradients both do the same dozen FP32 operations per step, rounded in another order: a dozen ulp of the
# parameter and of its update, which is at most some 10 lr here (Adam's first steps are lr, RMSprop's 10 lr).
STEPS, ULPS = 10, 16 * 2.0**-23

CASES: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {}),
    ("AdamW", {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3}),
    ("AdamW", {"maximize": True}),
    ("AdamW", {"amsgrad": True}),
    ("Adam", {}),
    ("Adam", {"weight_decay": 0.1}),
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "maximize": True}),
    ("RMSprop", {"lr": 1e-3}),
    ("RMSprop", {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.01}),
    ("RMSprop", {"lr": 1e-3, "centered": True}),
]


@pytest.mark.parametrize(
    ("name", "options"), CASES, ids=lambda v: v if isinstance(v, str) else "-".join(v) or "defaults"
)
def test_torch_optim(name: str, options: dict[str, Any]) -> None:
    ours, theirs = list(small_model().parameters()), list(small_model().parameters())
    mine = getattr(optim, name)(ours, state_format="fp32", compiled=False, **options)
    other = getattr(torch.optim, name)(theirs, **options)
    for _ in range(STEPS):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        mine.step()
        other.step()
    for a, b in zip(ours, theirs, strict=True):
        bound = STEPS * ULPS * (b.abs().max().item() + 10 * options.get("lr", 1e-3))
        torch.testing.assert_close(a, b, rtol=0, atol=bound)


@pytest.mark.parametrize("momentum", [0.0, 0.95])
def test_muon_is_torchs(momentum: float) -> None:
    """Without momentum both orthogonalise the very gradient, by the same BF16 products: the step is equal to FP32 ulps. With
    it an ulp of the momentum may round to another BF16 number, and the products spread that over the whole step by an amount
    that differs between CPUs; so the momentum is compared, which is what the step was computed from."""
    ours, theirs = (torch.nn.Parameter(torch.ones(48, 64)) for _ in range(2))
    mine = optim.Muon([ours], lr=0.02, momentum=momentum, state_format="fp32", compiled=False)
    other = torch.optim.Muon([theirs], lr=0.02, momentum=momentum)
    for _ in range(STEPS):
        ours.grad = torch.randn(48, 64)
        theirs.grad = ours.grad.clone()
        mine.step()
        other.step()
    buffer, expected = mine.state[ours]["momentum_buffer.fp32.value"], other.state[theirs]["momentum_buffer"]
    torch.testing.assert_close(buffer, expected, rtol=0, atol=STEPS * ULPS * float(expected.abs().max()))
    if momentum == 0:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=STEPS * ULPS * 1.0)


def lion(p: Tensor, g: Tensor, state: dict[str, Tensor], step: int) -> Tensor:
    m = state.setdefault("m", torch.zeros_like(p))
    update = (0.9 * m + 0.1 * g).sign()
    state["m"] = 0.99 * m + 0.01 * g
    return p * (1 - 1e-3 * 0.1) - 1e-3 * update


def lamb(p: Tensor, g: Tensor, state: dict[str, Tensor], step: int) -> Tensor:
    m, v = state.setdefault("m", torch.zeros_like(p)), state.setdefault("v", torch.zeros_like(p))
    state["m"], state["v"] = m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    r = (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-6) + 0.1 * p
    ratio = p.norm() / r.norm() if p.norm() > 0 and r.norm() > 0 else 1.0
    return p - 1e-3 * ratio * r


@pytest.mark.parametrize(("name", "reference"), [("Lion", lion), ("LAMB", lamb)])
def test_the_papers_formula(name: str, reference: Callable[..., Tensor]) -> None:
    model = small_model()
    exact = [p.double() for p in parameters_of(model)]
    states: list[dict[str, Tensor]] = [{} for _ in exact]
    optimizer = getattr(optim, name)(
        model.parameters(), lr=1e-3, weight_decay=0.1, state_format="fp32", compiled=False
    )
    for step, batch in enumerate(batches(5), 1):
        train(model, optimizer, [batch])
        gradients = [p.grad for p in model.parameters()]
        exact = [reference(p, g.double(), s, step) for p, g, s in zip(exact, gradients, states, strict=True)]  # type: ignore[union-attr]
    for p, wanted in zip(model.parameters(), exact, strict=True):
        off = (p.double() - wanted).abs()
        # Lion's sign may differ where 0.9 m + 0.1 g rounds to the other side of 0: in no element here.
        assert off.max() <= 5 * ULPS * (p.abs().max() + 1e-3)


def test_lamb_of_zeros_has_ratio_one() -> None:
    p = torch.nn.Parameter(torch.zeros(8))
    p.grad = torch.ones(8)
    optim.LAMB([p], lr=0.5, weight_decay=0.0, compiled=False).step()
    torch.testing.assert_close(p.detach(), torch.full((8,), -0.5), rtol=1e-5, atol=0)
