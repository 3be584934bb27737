"""A parameter updated in pieces draws, for every element, the random bits that it draws whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fp8compile import optim
from fp8compile.optim.compiled_step import signed
from fp8compile.optim.row_views import pieces, viewed


@pytest.mark.parametrize("as_compiled", [False, True])
@pytest.mark.parametrize("shape", [(20, 208), (20, 128), (20, 72)], ids=str)
def test_pieces_are_the_whole(shape: tuple[int, int], as_compiled: bool) -> None:
    """Rows of 208: a group of 128 and a short one, two pieces. The weights are rounded stochastically, by element number:
    by the piece's offset, which is in its stream where code for it is compiled."""
    p = nn.Parameter(torch.randn(shape).bfloat16())
    p.grad = torch.randn(shape).bfloat16()
    optimizer = optim.AdamW([("w", p)], lr=1e-2, overrides={"*": "e4m3_expanded"}, compiled=False)
    plan, tensors = optimizer.step_function(p)
    assert plan.rounds_stochastically
    tensors["step"].fill_(1)
    expected = plan(tensors)["param"]
    found = p.detach().clone()
    for piece, view in pieces(plan, p):
        taken = viewed(tensors, view)
        if as_compiled:
            signature, taken, _ = signed(piece, taken)
            piece = signature.plan
        view(found).copy_(piece(taken)["param"])
    assert torch.equal(found, expected)
