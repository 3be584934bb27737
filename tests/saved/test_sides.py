"""Codes keep the side of edges: for every value near an edge, whatever the way to it; and where they cannot."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8compile.fx.partition import PartitionedGraph
from fp8compile.numerics import INT8, Groupwise
from fp8compile.recipe.context import Context
from fp8compile.recipe.recipe import Recipe
from fp8compile.saved.judge import Judge
from fp8compile.saved.sides import Sides, keep_sides
from fp8compile.saved.stored import Stored
from tests.support.graphs import split_of


class Between(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.function = nn.Linear(32, 64), nn.Linear(64, 32), function
        self.w, self.c = nn.Parameter(torch.randn(64)), nn.Parameter(torch.randn(64))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.function(self.a(x)))


def sides(model: nn.Module, saved_format: str = "auto") -> list[Sides | None]:
    """Of all values that are stored."""
    torch._dynamo.reset()
    options = {"saved.min_numel": 0, "linears": "off", "saved": saved_format}
    split: PartitionedGraph = split_of(model, torch.randn(128, 32), disabled="encode_saved", **options)
    judge = Judge(split, Context(Recipe(**options)))
    return [d.sides for edge in split.edges if edge.is_tensor and isinstance(d := judge.decide(edge), Stored)]


@pytest.mark.parametrize("edge", [0.0, 0.3, -1.7, 1e-6])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_every_value_lies_on_its_side(edge: float, sign: float) -> None:
    """All values of a group within four steps of an edge, in quarters of a step, and a largest one that sets the step."""
    step = 4.0 / 127
    x = torch.cat([edge + torch.arange(-16, 17) * step / 4, torch.tensor([4.0])]) * sign
    codec = Groupwise(INT8, len(x))
    codes, scale = codec.encode(x)
    back = codec.decode(codes, scale, torch.float32)
    crossed = (x > edge * sign) != (back > edge * sign)
    kept = codec.decode(keep_sides(codes, x > back, crossed), scale, torch.float32)
    assert torch.equal(kept > edge * sign, x > edge * sign)
    assert ((kept - x).abs() <= step * (1 + 2.0**-7)).all() and torch.equal(kept[~crossed], back[~crossed])
    assert edge == 0.3 or bool(crossed.any()) or edge == -1.7, "the test has something to keep"


def test_the_largest_codes_stay_in_int8() -> None:
    codes = torch.tensor([127, -127, 0], dtype=torch.int8)
    kept = keep_sides(codes, torch.tensor([True, False, True]), torch.tensor([True, True, True]))
    assert kept.tolist() == [127, -127, 1]


@pytest.mark.parametrize("function", [
    lambda h: h.clamp(-1, 1),
    F.hardtanh,
    lambda h: F.relu(F.layer_norm(h, (64,))),
    lambda h: F.relu(F.batch_norm(h, None, None, training=True)),
    lambda h: F.layer_norm(F.relu(h), (64,)),
    lambda h: h.masked_fill(torch.arange(64) < 8, 0.5).clamp(-1, 1),
])  # fmt: skip
def test_edges_are_found(function: Callable[[Tensor], Tensor]) -> None:
    assert any(each is not None for each in sides(Between(function)))


def test_the_affine_way_to_an_edge_may_go_through_parameters() -> None:
    model = Between(torch.relu)
    model.function = lambda h: F.relu(F.layer_norm(h, (64,), model.w, model.c))
    [found] = [each for each in sides(model) if each is not None]
    assert len(found.operands) >= 4, "mean, rstd, weight and bias"


def test_the_way_to_an_edge_may_go_through_a_clamp() -> None:
    [found] = [each for each in sides(Between(lambda h: F.hardtanh(h.clamp(min=-2.0)))) if each is not None]
    assert len(found.comparisons) == 3, "its own edge, and both of hardtanh"


@pytest.mark.parametrize("size", [torch.abs, lambda h: h.norm(p=1, dim=-1, keepdim=True) * torch.ones(64)])
def test_signs_behind_a_clamp_are_kept(size: Callable[[Tensor], Tensor]) -> None:
    """A code of 0 has none: of Gaussian values 0.3 % would lose their gradient."""
    [found] = [each for each in sides(Between(lambda h: size(h.clamp(max=1.0)))) if each is not None]
    assert len(found.comparisons) == 2, "the clamp's edge, and zero"
    h = torch.tensor([0.001, -0.001, 0.0, 0.9, 4.0])
    assert found.crossed(h, h.round(decimals=2), []).tolist() == [True, True, False, False, False]


def test_edges_in_several_views_are_kept() -> None:
    def function(h: Tensor) -> Tensor:
        return F.relu(h.view(4, 32, 64)).flatten(0, 1) * F.relu(h)

    model = Between(function)
    fn = torch.compile(
        model, backend="fp8compile", options={"debug.codegen": "eager", "saved": "int8", "saved.min_numel": 0}
    )
    fn(torch.randn(128, 32)).sum().backward()
    assert any(each is not None for each in sides(model, "int8"))


@pytest.mark.parametrize(
    "function",
    [
        torch.tanh,
    F.gelu,
    lambda h: F.relu(h * h - 1),  # not monotone
    lambda h: torch.where(h.cumsum(-1) > 0, h, -h),  # not element by element
    lambda h: F.relu((F.layer_norm(h, (64,)) + 0.6) * h),  # by two ways, the longer one found last
])  # fmt: skip
def test_there_is_none_to_keep(function: Callable[[Tensor], Tensor]) -> None:
    assert not any(sides(Between(function), "int8"))


def test_an_edge_that_depends_on_another_code_is_not_kept() -> None:
    class Two(Between):
        def forward(self, x: Tensor) -> Tensor:
            g, u = self.a(x).tanh(), self.a(x * 2)
            return self.b(F.relu(u - F.gelu(g)) * g)

    assert not any(sides(Two(torch.relu), "int8"))


def test_no_mask_of_a_network_of_convolutions_is_wrong() -> None:
    """Convolution, BatchNorm, relu: each element that the exact gradient passes, and no other, has one from codes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
    x = torch.randn(8, 3, 16, 16)
    model[1].bias.data.normal_()
    gradients = []
    for backend in ("exact", "ours"):
        torch._dynamo.reset()
        fn = (
            model
            if backend == "exact"
            else torch.compile(model, backend="fp8compile", options={"debug.codegen": "eager"})
        )
        model.zero_grad()
        out = fn(x)
        out.backward(torch.ones_like(out))
        gradients.append(model[1].bias.grad.clone())  # the number of elements that are on
    assert torch.equal(*gradients)
