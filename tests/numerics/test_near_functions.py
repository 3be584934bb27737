"""Adam's step by functions that are as far off as a GPU's short forms may be (numerics/near_functions.py).

U is 2**-24; an ulp is at most 2 U of its number.

  * rest = -expm1(t log(b)): the logarithm and the product leave the exponent off by 3 U, which moves 1 - e**r by no more than
    that (r e**r / (e**r - 1) <= 1); expm1 is off by 2 U. Together 5 U, under 3 ulp.
  * The update is lr / rest1 * m / (sqrt(v) / sqrt(rest2) + eps): rests 5 U and half of it, the root 2 U, two quotients 4 U
    each, and eight roundings: 26 U. Weights are rounded besides.
"""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch
from torch import Tensor

from fp8compile.numerics import near_functions as near
from fp8compile.optim.updates import AdamUpdate
from tests.support.reference import U

REST, UPDATE = 5 * U, 26 * U
BETAS = torch.tensor([0.0, 1e-30, 0.1, 0.5, 0.9, 0.95, 0.99, 0.999, 0.9999, 0.99999, 1 - 2.0**-24])
STEPS = torch.tensor([*range(1, 200), *(10**k for k in range(3, 8))], dtype=torch.float32)


def moved(x: Tensor, by: float) -> Tensor:
    """A float64 number off by ``by`` of itself, in FP32: rounding it adds U at most."""
    return (x * (1 + by)).float()


def rest_off(b: Tensor, t: Tensor, ways: tuple[int, int]) -> Tensor:
    """``rest`` as a GPU computes it, with a logarithm and an expm1 that are off by an ulp, up or down."""
    log = moved(b.double().log(), ways[0] * U)
    return -moved(torch.expm1((t * log).double()), ways[1] * U)


@pytest.mark.parametrize("ways", itertools.product((-1, 1), repeat=2))
def test_one_less_a_power_is_within_three_ulp(ways: tuple[int, int]) -> None:
    b, t = BETAS[:, None], STEPS[None]
    exact = -torch.expm1(t.double() * b.double().log())
    assert ((rest_off(b, t, ways).double() - exact).abs() <= REST * exact).all()


def test_torch_s_own_is_no_nearer() -> None:
    """What is replaced: at t = 1 and b = 0.999 a power that is off by an ulp is off by 60 of its difference to 1."""
    b, t = BETAS[:, None], STEPS[None]
    exact = -torch.expm1(t.double() * b.double().log())
    assert float(((1 - b**t).double() / exact - 1).abs()[1:].max()) > 100 * REST


@pytest.mark.parametrize("ways", itertools.product((-1, 1), repeat=5))
@pytest.mark.parametrize("eps", [1e-8, 0.0])
def test_an_update_is_off_by_some_roundings_of_it(ways: tuple[int, ...], eps: float) -> None:
    generator = torch.Generator().manual_seed(0)
    p, m, g, v = (torch.randn(1024, generator=generator) for _ in range(4))
    v, m = v.square() * torch.logspace(-30, 2, 1024), m * torch.logspace(-15, 1, 1024)
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": eps, "weight_decay": 0.0}
    update = AdamUpdate(decoupled=True)
    n = {name: torch.tensor(value) for name, value in update.numbers(group).items()}
    off = {
        "sqrt": lambda x: moved(x.double().clamp_min(2.0**-126).sqrt(), ways[0] * U),
        "quotient": lambda a, b: moved(a.double() / b.double(), ways[1] * 3 * U),
        "rest": lambda b, t: rest_off(b, t, (ways[2], ways[3])),
    }
    for t in (1.0, 2.0, 1000.0):
        states = {"exp_avg": m, "exp_avg_sq": v}
        with mock.patch.multiple(near, **off):
            found, _ = update(torch.zeros_like(p), g, states, n, torch.tensor(t))
        exact = _exactly(m, v, g, n, t)
        assert ((found.double() - exact).abs() <= UPDATE * exact.abs() + 1e-40).all()


def _exactly(m: Tensor, v: Tensor, g: Tensor, n: dict[str, Tensor], t: float) -> Tensor:
    """The change of a weight in float64, of moments that are rounded to FP32 as the step rounds them."""
    _, new = AdamUpdate(decoupled=True)(torch.zeros_like(m), g, {"exp_avg": m, "exp_avg_sq": v}, n, torch.tensor(t))
    m, v = new["exp_avg"].double(), new["exp_avg_sq"].double()
    lr, eps, rests = n["lr"].double(), n["eps"].double(), [1 - n[b].double() ** t for b in ("beta1", "beta2")]
    return -lr / rests[0] * m / (v.sqrt() / rests[1].sqrt() + eps)


def test_nothing_is_divided_by_zero() -> None:
    """Second moments of zeros, and smaller than a GPU's root takes: finite without eps."""
    off = {"sqrt": lambda x: x.clamp_min(2.0**-126).sqrt()}
    update = AdamUpdate(decoupled=True)
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 0.0, "weight_decay": 0.0}
    n = {name: torch.tensor(value) for name, value in update.numbers(group).items()}
    v, zeros = torch.tensor([0.0, 1e-45, 1e-39]), torch.zeros(3)
    with mock.patch.multiple(near, **off):
        p, _ = update(torch.ones(3), zeros, {"exp_avg": zeros, "exp_avg_sq": v}, n, torch.tensor(1.0))
    assert torch.equal(p, torch.ones(3))
