"""Adam's step by functions that are as far off as a GPU's short forms may be (numerics/near_functions.py).

U is 2**-24; an ulp is at most 2 U of its number. The update is step_size * (m / (sqrt(v) * c + eps)). Its numbers are
rounded once from FP64, U each: the root 2 U, c and the product 2 U, the sum with eps U; the quotient 3 U and its rounding U;
step_size, the product and its rounding 3 U. Together 12 U. Weights are rounded besides.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Interpreter, Node

from fp8compile.numerics.near_functions import OPERATORS
from fp8compile.optim.captured_update import CapturedUpdate
from tests.support.captured import numbers_of, update_of
from tests.support.reference import U

UPDATE = 12 * U
SIZE = 1024


class Off(Interpreter):
    """Runs a step with near functions that are off."""

    def __init__(self, update: CapturedUpdate, sqrt: float, quotient: float) -> None:
        super().__init__(update.elements)
        self._forms = {
            OPERATORS["sqrt"]: lambda x: moved(x.double().clamp_min(2.0**-126).sqrt(), sqrt),
            OPERATORS["quotient"]: lambda a, b: moved(a.double() / b.double(), quotient),
        }

    def run_node(self, n: Node) -> object:
        form = self._forms.get(n.target)
        return super().run_node(n) if form is None else form(*self.fetch_args_kwargs_from_env(n)[0])


def moved(x: Tensor, by: float) -> Tensor:
    """A float64 number off by ``by`` of itself, in FP32: rounding it adds U at most."""
    return (x * (1 + by)).float()


def adamw(eps: float) -> tuple[CapturedUpdate, dict[str, object]]:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(SIZE))], eps=eps, weight_decay=0.0)
    return update_of(optimizer), optimizer.param_groups[0]


@pytest.mark.parametrize("ways", itertools.product((-1, 1), repeat=2))
@pytest.mark.parametrize("eps", [1e-8, 0.0])
def test_an_update_is_off_by_some_roundings_of_it(ways: tuple[int, int], eps: float) -> None:
    generator = torch.Generator().manual_seed(0)
    p, m, g, v = (torch.randn(SIZE, generator=generator) for _ in range(4))
    v, m = v.square() * torch.logspace(-30, 2, SIZE), m * torch.logspace(-15, 1, SIZE)
    update, group = adamw(eps)
    for t in (1, 2, 1000):
        n = [*numbers_of(update, group, t).values()]
        found, *states = Off(update, ways[0] * U, ways[1] * 3 * U).run(
            torch.zeros_like(p), g, m, v, *n[: len(update.names)]
        )
        exact = _exactly(*states, eps, t)
        assert ((found.double() - exact).abs() <= UPDATE * exact.abs() + 1e-40).all()


def _exactly(m: Tensor, v: Tensor, eps: float, t: int) -> Tensor:
    """The change of a weight in float64, of moments that are rounded to FP32 as the step rounds them."""
    rests = 1 - 0.9**t, 1 - 0.999**t
    return -1e-3 / rests[0] * m.double() / (v.double().sqrt() / rests[1] ** 0.5 + eps)


def test_nothing_is_divided_by_zero() -> None:
    """Second moments of zeros, and smaller than a GPU's root takes: finite without eps."""
    update, group = adamw(0.0)
    v, zeros = torch.tensor([0.0, 1e-45, 1e-39]), torch.zeros(3)
    n = [*numbers_of(update, group, 1).values()]
    p = Off(update, 0.0, 0.0).run(torch.ones(3), zeros, zeros, v, *n[: len(update.names)])[0]
    assert torch.equal(p, torch.ones(3))
