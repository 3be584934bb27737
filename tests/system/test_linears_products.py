"""Which products of a backward are a linear's: those of its own autograd node, whatever reads the same input."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.config as dynamo
from torch import Tensor, nn

import fp8compile
from fp8compile.linears.block_operands import ROWS_VARY
from tests.support.emulation import linear, results, trained
from tests.support.measure import compiled, matmul_entries, why
from tests.support.reference import sqnr_db

SIZE = 32
Product = Callable[[Tensor, Tensor], Tensor]
# Another order of sums may round one code of 1,024 the other way, by 1/16 of its value at most: 54 dB. A product in FP8 that
# should be exact is off by 1/32 of each value: 30 dB.
ONE_CODE = 50.0


class Model(nn.Module):
    """A function of x and a weight."""

    def __init__(self, fn: Product, weight: Tensor) -> None:
        super().__init__()
        self.fn, self.weight = fn, nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x, self.weight)


def attend(q: Tensor, x: Tensor) -> Tensor:
    return (q @ x.t()).softmax(-1) @ x


def attend_in_batches(q: Tensor, x: Tensor) -> Tensor:
    """Products of two activations as bmm, and of as many elements as the weight."""
    return torch.bmm(q[:, None].mT, x[:, None])


class Attend(torch.autograd.Function):
    """(x W') x': the gradient by x W' multiplies x, in the autograd node of the linear."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        y = x @ weight.t()
        ctx.save_for_backward(x, weight, y)
        return y @ x.t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, y = ctx.saved_tensors
        inner = dy @ x
        return dy.t() @ y + inner @ weight, inner.t() @ x


class Gate(torch.autograd.Function):
    """(x W') * (x V') in one autograd node, V = 2 W: two wgrads of one size that read one input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, other: Tensor) -> Tensor:
        u, v = x @ weight.t(), x @ other.t()
        ctx.save_for_backward(x, weight, other, u, v)
        return u * v

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight, other, u, v = ctx.saved_tensors
        du, dv = dy * v, dy * u
        return du @ weight + dv @ other, du.t() @ x, dv.t() @ x


def gate(x: Tensor, w: Tensor) -> Tensor:
    return Gate.apply(x, w, 2 * w)  # type: ignore[no-any-return, no-untyped-call]


# Each with how it is meant: what is a linear stands as ``linear``.
PRODUCTS: dict[str, tuple[Product, Product]] = {
    "scores of a projection and its input": (lambda x, w: attend(x @ w.t(), x), lambda x, w: attend(linear(x, w), x)),
    "as bmm": (
        lambda x, w: attend_in_batches(x @ w.t(), x),
        lambda x, w: attend_in_batches(linear(x, w), x),
    ),
    "the input squared": (lambda x, w: x @ w.t() + x @ x, lambda x, w: linear(x, w) + x @ x),
    "one function": (
        lambda x, w: Attend.apply(x, w),  # type: ignore[no-any-return, no-untyped-call]
        lambda x, w: linear(x, w) @ x.t(),
    ),
    "two linears in one function": (gate, lambda x, w: linear(x, w) * linear(x, 2 * w)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_of_two_activations_is_no_wgrad(name: str) -> None:
    written, meant = PRODUCTS[name]
    torch.manual_seed(0)
    x, weight = torch.randn(SIZE, SIZE, requires_grad=True), torch.randn(SIZE, SIZE)
    model, reference = Model(written, weight), Model(meant, weight)
    fn = compiled(model, linears="tensorwise", saved="off", **{"linears.emulate": True})
    ours = results(fn, trained(model, x), x)
    expected = results(reference, trained(reference, x), x)
    assert min(map(sqnr_db, expected, ours)) > ONE_CODE
    told = matmul_entries(fp8compile.report(fn))  # type: ignore[arg-type]
    many = 2 if written is gate else 1
    assert Counter(x.direction for x in told if not why(x)) == dict.fromkeys(("forward", "dgrad", "wgrad"), many)


def test_a_wgrad_that_no_dgrad_stands_beside_is_not_known_in_a_function() -> None:
    model = Model(gate, torch.randn(SIZE, SIZE))
    fn = compiled(model, linears="tensorwise", saved="off", **{"linears.emulate": True})
    fn(torch.randn(SIZE, SIZE)).sum().backward()
    assert {x.direction for x in matmul_entries(fp8compile.report(fn))} == {"forward"}  # type: ignore[arg-type]


@pytest.fixture
def rows_are_counted() -> Iterator[None]:
    """Dynamo takes operations into the graph whose number of results only a run knows."""
    with dynamo.patch(capture_dynamic_output_shape_ops=True):
        yield


class Routed(nn.Module):
    """Half of the rows by each of two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SIZE, SIZE)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(SIZE), nn.Linear(SIZE, 2 * SIZE), nn.GELU(), nn.Linear(2 * SIZE, SIZE))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = h = self.first(x)
        for i, expert in enumerate(self.experts):
            rows = (x[:, i] > 0).nonzero().squeeze(1)
            y = y.index_add(0, rows, expert(h[rows]))
        return y


BLOCKS = ("mxfp8",)


@pytest.mark.parametrize("linear", ["tensorwise", "rowwise", "int8", *BLOCKS])
def test_rows_that_only_a_run_counts(rows_are_counted: None, linear: str) -> None:
    torch.manual_seed(0)
    model, x = Routed(), torch.randn(64, SIZE, requires_grad=True)
    fn = torch.compile(
        model,
        backend="fp8compile",
        fullgraph=True,
        options=dict(linears=linear, **{"debug.codegen": "eager", "linears.emulate": True}),
    )
    exact = results(model, trained(model, x), x)
    for rows in (x, torch.zeros_like(x).requires_grad_(), x):  # with zeros no expert has rows
        ours = results(fn, trained(model, rows), rows)
    assert min(map(sqnr_db, exact, ours)) > 15  # E5M2: 1/16 of each value, twice
    told = matmul_entries(fp8compile.report(fn))
    assert Counter(x.direction for x in told if not why(x))["forward"] == (1 if linear in BLOCKS else 5)
    assert {why(x) for x in told} - {""} == ({ROWS_VARY.format(linear)} if linear in BLOCKS else set())
