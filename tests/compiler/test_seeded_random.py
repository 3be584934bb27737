"""debug.codegen="eager": a mask that the backward draws again is the mask that the forward drew."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.measure import compiled


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.dropout(F.gelu(self.first(x)), 0.5))


def test_the_backward_has_the_mask_of_the_forward() -> None:
    model, x = Dropped(), torch.randn(256, 64)
    with torch.no_grad():  # what leaves the model is what the dropout let through, times 2
        model.second.weight.copy_(torch.eye(64))
        model.second.bias.zero_()
    out = compiled(model, saved="off", linears="off")(x)
    rewritten = compiled(model, **{"saved.min_numel": 10**9})(x)  # nothing is a code; the mask is made anew, not kept
    for each in (out, rewritten):
        weight, bias = torch.autograd.grad(each.sum(), [model.second.weight, model.first.bias])
        kept = each.detach() != 0
        inner = model.first(x).detach().requires_grad_()
        (slope,) = torch.autograd.grad((F.gelu(inner) * kept * 2).sum(), inner)
        torch.testing.assert_close(bias, slope.sum(0))
        torch.testing.assert_close(weight, each.detach().sum(0).expand(64, 64))


def test_two_draws_differ_and_a_seed_repeats() -> None:
    model, x = Dropped(), torch.randn(256, 64)
    run = compiled(model)
    torch.manual_seed(3)
    first, second = run(x), run(x)
    torch.manual_seed(3)
    assert torch.equal(first, run(x)) and not torch.equal(first, second)
