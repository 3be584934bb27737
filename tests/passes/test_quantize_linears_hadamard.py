"""quantize_linears with ``linears.hadamard_wgrad``: operands of the wgrads in INT8, rotated by Hadamard matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from fp8compile.compiler.inductor import NOTHING_TO_TURN
from fp8compile.numerics.hadamard import rotated
from fp8compile.recipe.recipe import Recipe
from fp8compile.reporting.entries import Linear
from tests.support.graphs import joint_of
from tests.support.integers import OnTheLeft, linears_of, product
from tests.support.measure import compiled, llama_case

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("vnni")


@pytest.mark.parametrize("model", ["right", "left"])
def test_operands_of_the_wgrad_alone_are_rotated(model: str) -> None:
    linear, x, dy = nn.Linear(144, 80, bias=False), torch.randn(300, 144, requires_grad=True), torch.randn(300, 80)
    run, given, dy = (linear, x, dy) if model == "right" else (OnTheLeft(), x.detach().t().requires_grad_(), dy.t())
    y = compiled(run, preset="linear_only", linears="int8", **{"linears.hadamard_wgrad": True})(given)
    dx, dw = torch.autograd.grad(y, (given, run.weight), dy)
    x, w = x.detach(), run.weight
    if model == "left":
        dx, dy, y = dx.t(), dy.t(), y.t()
    assert torch.allclose(y, product(x, w)) and torch.allclose(dx, product(dy, w.t()))
    by_hand = product(rotated(dy, 0).t(), rotated(x, 0).t())
    assert torch.allclose(dw, by_hand, atol=1e-5 * float(by_hand.abs().max()))
    assert not torch.allclose(dw, product(dy.t(), x.t()), atol=1e-5 * float(by_hand.abs().max()))


def test_what_is_rotated_is_shared_and_reported() -> None:
    layer, args = llama_case(2, 64, 64, 128, 4)
    graph = joint_of(layer, *args, linears="int8", **{"linears.hadamard_wgrad": True})
    assert [node.target for node in graph.nodes].count(aten.bmm.default) == 4 + 7, "activations and gradients"
    told = linears_of(layer, *args, **{"linears.hadamard_wgrad": True})
    formats = {x.direction: x.formats for x in told if isinstance(x, Linear)}
    assert formats == {
        **dict.fromkeys(("forward", "dgrad"), "int8 x int8 rowwise"),
        "wgrad": "int8 x int8 rowwise, rotated",
    }


def test_rows_that_vary_are_not_rotated() -> None:
    options = {"debug.codegen": "eager", "linears": "int8", "linears.hadamard_wgrad": True, "linears.emulate": True}
    fn = torch.compile(nn.Linear(64, 32), backend="fp8compile", options=options, dynamic=True)
    fn(torch.randn(40, 64))
    formats = {x.formats for x in fp8compile.report(fn).linears if x.direction == "wgrad"}
    assert formats == {"int8 x int8 rowwise, emulated, not rotated: rows that vary from call to call"}


def test_rotated_outliers_cost_a_wgrad_less() -> None:
    """Tokens a hundred times as large as others: without a turn they set the step of all channels of the wgrad."""
    torch.manual_seed(0)
    linear, x = nn.Linear(128, 64, bias=False), torch.randn(512, 128)
    x[::64] *= 100
    dy = torch.randn(512, 64)
    exact = dy.double().t() @ x.double()

    def off(turns: bool) -> float:
        torch._dynamo.reset()
        fn = compiled(linear, preset="linear_only", linears="int8", **{"linears.hadamard_wgrad": turns})
        (dw,) = torch.autograd.grad(fn(x), linear.weight, dy)
        return float((dw - exact).norm() / exact.norm())

    # An operand's step falls with its largest value: a quarter of it for x, whose error is 3/4 of the sum in squares or less.
    assert off(True) < off(False)


def saved_with(model: nn.Module, x: Tensor, **options: object) -> int:
    torch._dynamo.reset()
    recipe = Recipe(**{"linears": "int8", **options})  # type: ignore[arg-type]
    return fp8compile.explain(model, (x,), recipe=recipe).saved_bytes


class Shared(nn.Module):
    """The second linear's input is read by a product too, which keeps it for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        return self.b(h) * h


@pytest.mark.parametrize("turns", [False, True])
def test_real_products_leave_no_activation_exact_that_emulated_ones_store(turns: bool) -> None:
    x = torch.randn(256, 64)
    real, emulated = (
        saved_with(Shared(), x, **{"linears.emulate": each, "linears.hadamard_wgrad": turns})
        for each in (False, True)
    )
    assert real == emulated < saved_with(Shared(), x, linears="off", saved="off")


def test_what_is_rotated_is_no_operand_of_attention() -> None:
    x = torch.randn(256, 64)
    found = {
        saved_with(Shared(), x, **{"linears.hadamard_wgrad": True, "saved.attention": each})
        for each in (True, False, "auto")
    }
    assert len(found) == 1


def test_fp16_operands_are_not_rotated() -> None:
    """16 values of 20,000 are 80,000 rotated, which FP16 does not hold."""
    model, x = nn.Linear(64, 64).half(), torch.randn(256, 64).half()
    x[:, 3] = 20_000
    formats = {
        t.formats
        for t in linears_of(model, x, **{"linears.hadamard_wgrad": True, "fp32.observe": False})
        if isinstance(t, Linear)
    }
    assert any("not rotated" in told and "FP16" in told for told in formats)
    y = compiled(
        model, preset="linear_only", linears="int8", **{"linears.hadamard_wgrad": True, "fp32.observe": False}
    )(x)
    [dw] = torch.autograd.grad(y, model.weight, torch.full_like(y, 1e-3))
    assert dw.isfinite().all()


def test_turning_without_int8_is_remarked_on() -> None:
    for linear, remarked in (("tensorwise", True), ("int8", False), ("int8_blocks", False)):
        torch._dynamo.reset()
        recipe = Recipe().changed({"linears": linear, "linears.hadamard_wgrad": True, "linears.emulate": True})
        report = fp8compile.explain(nn.Linear(64, 64), (torch.randn(64, 64),), recipe=recipe)
        assert (NOTHING_TO_TURN in report.remarks) == remarked
