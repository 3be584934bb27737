"""A parameter updated in pieces draws, for every element, the random bits that it draws whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fp8compile import optim
from fp8compile.optim.row_views import pieces, viewed


@pytest.mark.parametrize("shape", [(20, 208), (20, 128), (20, 72)], ids=str)
def test_pieces_are_the_whole(shape: tuple[int, int]) -> None:
    """Rows of 208: a group of 128 and a short one, two pieces. The weights are rounded stochastically, by element number."""
    p = nn.Parameter(torch.randn(shape).bfloat16())
    p.grad = torch.randn(shape).bfloat16()
    optimizer = optim.AdamW([("w", p)], lr=1e-2, overrides={"*": "e4m3_expanded"}, compiled=False)
    plan, tensors = optimizer.step_function(p)
    assert plan.rounds_stochastically
    tensors["step"].fill_(1)
    expected = plan(tensors)["param"]
    found = p.detach().clone()
    for piece, view in pieces(plan, p):
        view(found).copy_(piece(viewed(tensors, view))["param"])
    assert torch.equal(found, expected)
