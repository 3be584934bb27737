"""The edges between the halves: what takes the place of a kept value is checked, and counted, as that value was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8compile._version import release_of
from fp8compile.fx.partition import NO_VERSION_CHECK
from tests.support.graphs import split_of
from tests.support.measure import compiled
from tests.support.reference import sqnr_db


class Stash(torch.autograd.Function):
    """Keeps its operands on ctx itself: eager then never asks whether they were changed since."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor) -> Tensor:
        ctx.x, ctx.table = x, table
        return x * table

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.x.tanh() * ctx.table, None


class Save(Stash):
    """Keeps them by ``save_for_backward``, which asks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(x, table)
        return x * table

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        x, table = ctx.saved_tensors
        return gradients[0] * x.tanh() * table, None


class Model(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(64, 64), function

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        result: Tensor = self.function.apply(self.linear(x), table)
        return result


def gradient_after_a_change(model: Model, fn: Any) -> Tensor:
    """Of the weight, the table having been changed in place between forward and backward."""
    torch.manual_seed(1)
    x, table = torch.randn(128, 64), torch.rand(128, 64)
    out = fn(x, table)
    table.mul_(2)
    [gradient] = torch.autograd.grad(out.sum(), [model.linear.weight])
    return gradient


def test_codes_of_an_unchecked_value_are_unchecked() -> None:
    """AOTAutograd counts the marks and leaves as many values unchecked, from the last: codes and scale are two for one."""
    split = split_of(Model(Stash), torch.randn(128, 64), torch.rand(128, 64))
    marked = [bool(edge.forward.meta.get(NO_VERSION_CHECK)) for edge in split.edges]
    codes = [edge.forward.meta["val"].dtype == torch.int8 for edge in split.edges]
    assert sum(codes) == 1 and marked[codes.index(True)]
    assert sum(marked) == 3 and marked == sorted(marked), "the table, the codes and their scale, after all others"


def test_what_eager_does_not_check_is_not_checked() -> None:
    model = Model(Stash)
    exact = gradient_after_a_change(model, model)
    found = gradient_after_a_change(model, compiled(model, **{"saved.min_numel": 0}))
    assert sqnr_db(exact, found) > 25  # INT8, whose bound is 1/254 of the largest


def test_what_eager_checks_is_checked() -> None:
    model = Model(Save)
    for fn in (model, compiled(model, **{"saved.min_numel": 0})):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradient_after_a_change(model, fn)


class Inputs(nn.Module):
    """Keeps an activation of another graph as codes, a buffer as it was read, and what a bias makes again."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(64), nn.Linear(64, 64)
        self.register_buffer("scale", torch.full((64,), 2.0))

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        y = torch.tanh(self.linear(F.gelu(x)) * self.scale.sqrt()) * F.gelu(self.norm(x + shift) + shift)
        self.scale.mul_(0.9).add_(y.detach().abs().mean(0))
        return y


def test_no_value_of_the_forwards_own_passes_for_an_input_of_it() -> None:
    """Inductor takes an input's memory for fixed by its name and, from torch 2.15 on, by a mark that is False for data."""
    x, shift = torch.randn(128, 64, requires_grad=True), torch.rand(64)
    split = split_of(Inputs(), x, shift, **{"saved.min_numel": 0})
    inputs = [edge for edge in split.edges if edge.forward.op == "placeholder"]
    made = [edge for edge in split.edges if edge not in inputs]
    assert [edge.backward.name for edge in inputs if not edge.backward.name.startswith("primals_")] == []
    names = [edge.backward.name for edge in made]
    assert [name for name in names if name.startswith("primals_")] == []
    assert "kept_primals" in " ".join(names) and any("clone" in name for name in names), names
    marks = [(edge.forward.meta.get("is_static_input"), edge.backward.meta.get("is_static_input")) for edge in inputs]
    assert all(a == b for a, b in marks)
    assert {mark for mark, _ in marks} == ({True, False} if release_of(torch.__version__) >= (2, 15) else {None})
    assert not any("is_static_input" in edge.backward.meta for edge in made)


def test_inputs_that_are_made_of_one_value_are_not_called_alike() -> None:
    """Code that runs node by node calls an input by its target: two of one name gave one of them the other's value."""
    split = split_of(
        nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), torch.randn(64, 64), linears="off"
    )
    edge = next(each for each in split.edges if each.is_tensor)
    made = [split.placeholder(edge, edge.forward) for _ in range(3)]
    assert [node.target for node in made] == [node.name for node in made] and len({*made}) == 3
