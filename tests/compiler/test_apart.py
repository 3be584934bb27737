"""A second compilation of a graph, for a check: what the user holds is not overwritten because of it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.measure import compiled


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z: Tensor = self.b(F.gelu(self.a(x)) * F.silu(self.a(y))) + x
        return z


def step(**options: object) -> tuple[list[Tensor], list[Tensor]]:
    """A step's inputs and outputs, before its backward and after it."""
    torch.manual_seed(0)
    model, data = Gated(), [torch.randn(32, 64) for _ in range(2)]
    out = compiled(model, **options, **{"debug.codegen": "inductor", "linears.emulate": True, "saved.min_numel": 0})(
        *data
    )
    held = [*data, out.detach(), *(p.detach() for p in model.parameters())]
    before = [each.clone() for each in held]
    out.square().mean().backward()
    return before, held


@pytest.mark.parametrize("changes", [{}, {"saved": "off"}])
def test_the_backward_of_a_checked_step_overwrites_nothing(changes: dict[str, str]) -> None:
    """The twin compiles before the step's own backward does, which then asks what of its inputs it may overwrite."""
    with torch._inductor.config.patch(force_disable_caches=True):  # code from a cache has its answer
        before, after = step(**changes, **{"debug.check": "first_step"})
    assert all(map(torch.equal, before, after))
