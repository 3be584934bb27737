"""A graph run node by node can do what its generated code can."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from tests.support.measure import compiled


class Whitened(nn.Module):
    """``torch.eye`` of more than 255 rows counts in uint16, which no operator does on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 300)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return (y.T @ y - torch.eye(300)).square().mean()


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_an_identity_matrix(codegen: str) -> None:
    torch.manual_seed(0)
    model, x = Whitened(), torch.randn(64, 32)
    loss = compiled(model, linears="off", saved="off", **{"debug.codegen": codegen})(x)
    torch.testing.assert_close(loss, model(x))


def test_tools_that_run_node_by_node() -> None:
    model, x = Whitened(), torch.randn(64, 32)
    assert fp8compile.check(model, x, recipe={"linears": "off"}).ok
