"""encode_saved: a kept value of any memory order comes back with its elements, and its strides, where they were."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from tests.support.graphs import split_of
from tests.support.measure import compiled

# The orders that are not their own inverse; NHWC, (0, 2, 3, 1), is one.
CYCLIC = [p for n in (3, 4) for p in itertools.permutations(range(n)) if any(p[p[d]] != d for d in range(n))]
# Off by, in INT8, relative to the group's largest: half a step, and what BF16 takes off the scale, so off the largest.
OFF = 1 / 254 + 2.0**-9
STEEPEST = 4 / 27**0.5  # of 1 - tanh(x)**2: 2 tanh(x) (1 - tanh(x)**2) at tanh(x)**2 = 1/3


def laid_out(shape: list[int], order: tuple[int, ...]) -> Tensor:
    """A leaf of ``shape`` whose dimensions lie in memory in ``order``."""
    memory = torch.randn([shape[d] for d in order])
    return memory.permute([order.index(d) for d in range(len(order))]).requires_grad_()


class Net(nn.Module):
    """w tanh(x): for x's gradient, g w (1 - tanh(x)**2), x is kept, and nothing else is encoded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.weight


@pytest.mark.parametrize("order", CYCLIC, ids=str)
def test_every_element_comes_back_where_it_was(order: tuple[int, ...]) -> None:
    """Sides of one size: no wrong order fails by its shape."""
    model, x = Net(), laid_out([8] * len(order), order)
    out = compiled(model, saved="int8", **{"saved.min_numel": 0})(x)
    weight = torch.randn_like(out)
    [found] = torch.autograd.grad((out * weight).sum(), [x])
    exact = weight * (1 - torch.tanh(x.detach()) ** 2)
    assert not torch.equal(found, exact), "nothing was encoded"
    assert bool(((found - exact).abs() <= weight.abs() * (STEEPEST * OFF * x.abs().max() + 2.0**-20)).all())


@pytest.mark.parametrize("order", [(0, 2, 3, 1), (0, 3, 1, 2), (1, 2, 0)], ids=str)
def test_codes_lie_in_the_order_of_memory_and_strides_come_back(order: tuple[int, ...]) -> None:
    shape = [6, 10, 14, 18][: len(order)]
    x = laid_out(shape, order)
    split = split_of(Net(), x, saved="int8")
    [codes] = [e for e in split.edges if e.forward.meta["val"].dtype == torch.int8]
    stored, in_memory = codes.forward.meta["val"], [shape[d] for d in order]
    # Inductor's layout optimization takes four dimensions for (N, C, H, W) and would lay codes out once more.
    rows = [shape[order[0]] * shape[order[1]] * shape[order[2]], in_memory[-1]] if len(order) == 4 else in_memory
    assert list(stored.shape) == rows and stored.is_contiguous()
    [tanh] = [n for n in split.bw.graph.nodes if n.target is torch.ops.aten.tanh.default]
    assert (tanh.args[0].meta["val"].shape, tanh.args[0].meta["val"].stride()) == (x.shape, x.stride())  # type: ignore[union-attr]
