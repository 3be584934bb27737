"""What is raised to a power below 1 has a pole at 0, it or its slope: it stays exact, so small values keep their size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from tests.support.measure import compiled
from tests.support.reference import sqnr_db


class Power(nn.Module):
    """w x**n of a product's result, of which some elements are far below their group's largest, where INT8 has 0."""

    def __init__(self, exponent: float) -> None:
        super().__init__()
        self.linear, self.exponent = nn.Linear(64, 64, bias=False), exponent

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x).abs().add(1e-4) ** self.exponent
        return result


@pytest.mark.parametrize("exponent", [1.9, 1.3, 0.7, 0.3, -0.3, -0.7])
def test_gradients_of_powers(exponent: float) -> None:
    """The gradient has x**(n - 1), and 1.9 - 1 too is less than 1."""
    model, x = Power(exponent), torch.randn(128, 64)
    with torch.no_grad():
        x[:, :] *= 10.0 ** torch.linspace(-4, 0, 128)[:, None]
    fn = compiled(model, saved="int8", **{"saved.min_numel": 0})
    found = [torch.autograd.grad(run(x).sum(), [model.linear.weight])[0] for run in (model, fn)]
    assert found[1].isfinite().all()
    assert sqnr_db(found[0], found[1]) > 25, fp8compile.report(fn).saved  # type: ignore[arg-type]
