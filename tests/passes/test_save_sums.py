"""save_sums: golden, contract, declines."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

from fp8compile.fx.partition import PartitionedGraph
from fp8compile.passes.save_sums import save_sums
from fp8compile.recipe.context import Context
from fp8compile.recipe.recipe import Recipe
from tests.support.graphs import backward_of, split_of
from tests.support.measure import compiled

aten = torch.ops.aten
OTHERS = "encode_saved,recompute_kept"


class Residual(nn.Module):
    """x + a(x), read by a square, whose backward needs it, and by the next residual, as in a layer compiled by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.a(x)
        out: Tensor = x + self.b(x * x)
        return out


def split(model: nn.Module | None = None, disabled: str = OTHERS) -> PartitionedGraph:
    torch._dynamo.reset()
    x = torch.randn(4, 32, 64)
    return split_of(model or Residual(), x, disabled=disabled, **{"linears.emulate": True})


def saved(found: PartitionedGraph) -> list[object]:
    return [e.forward.target for e in found.edges if not found.caller_owns(e.forward)]


def test_golden_what_reads_the_sum() -> None:
    lines = backward_of(split()).splitlines()
    assert_expected_inline(
        "\n".join(line for line in lines if "add_4" in line),
        """\
add_4: float32[4, 32, 64]
mul: float32[4, 32, 64] = mul(add_4, add_4)
mul_1: float32[4, 32, 64] = mul(view_5, add_4)""",
    )


def test_without_fp8_linears_nothing_is_changed() -> None:
    torch._dynamo.reset()
    found = split_of(Residual(), torch.randn(4, 32, 64), disabled=OTHERS, linears="off")
    assert aten.mm.default in saved(found) and aten.add.Tensor not in saved(found)


def test_the_sum_is_saved_instead_of_the_matmul_s_result() -> None:
    before, after = split(disabled=f"{OTHERS},save_sums"), split()
    assert aten.mm.default in saved(before) and aten.add.Tensor not in saved(before)
    assert aten.add.Tensor in saved(after) and aten.mm.default not in saved(after)
    assert after.saved_bytes() <= before.saved_bytes()


def test_it_is_idempotent() -> None:
    found = split()
    edges = [(e.forward.name, e.backward.name) for e in found.edges]
    save_sums(found, Context(Recipe()))
    assert [(e.forward.name, e.backward.name) for e in found.edges] == edges


class ReadTwice(Residual):
    """The backward needs a(x) by itself too."""

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        y = x + a
        out: Tensor = y + self.b(y * y) + a * a
        return out


class ReadOnce(Residual):
    """The forward reads the sum once: storing it would be a store more."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(torch.square(x + self.a(x)))
        return out


class Broadcast(Residual):
    """The sum is larger than what was added."""

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.a(x.narrow(0, 0, 1))
        out: Tensor = y + self.b(y * y)
        return out


class Scaled(Residual):
    """x + 2 a(x), one operation."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.add(x, self.a(x), alpha=2)
        out: Tensor = y + self.b(y * y)
        return out


class TwoSums(Residual):
    """Two sums of the same values; the backward needs the second."""

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        first, y = x + a, torch.add(x, a, alpha=2)
        out: Tensor = first * 3 + y + self.b(y * y)
        return out


@pytest.mark.parametrize("kind", [ReadTwice, ReadOnce, Broadcast])
def test_left_as_it_is(kind: Callable[[], nn.Module]) -> None:
    before, after = split(kind(), f"{OTHERS},save_sums"), split(kind())
    assert saved(after) == saved(before)


def test_a_sum_with_a_factor_is_one_too() -> None:
    found = saved(split(Scaled()))
    assert aten.add.Tensor in found and aten.mm.default not in found


@pytest.mark.parametrize("kind", [Residual, Scaled, TwoSums])
def test_gradients_are_those_of_the_graph_without_it(
    kind: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for disabled in ("", "save_sums"):
        monkeypatch.setenv("TORCHINDUCTOR_DISABLED_PASSES", disabled)
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, x = kind(), torch.randn(4, 32, 64, requires_grad=True)
        compiled(model, saved="off", **{"linears.emulate": True})(x).square().sum().backward()
        found.append([x.grad, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
