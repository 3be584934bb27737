"""Operators that are not torch's: what is assumed of them, what is declared, and what stays exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from fp8compile.analysis.sensitivity import declared
from fp8compile.analysis.sensitivity.declared import KNOWN, declarations_key, declare
from fp8compile.analysis.sensitivity.error import Error
from fp8compile.analysis.sensitivity.foreign import answer, response
from fp8compile.reporting.report import Report
from tests.support.measure import compiled
from tests.support.reference import sqnr_db

NAME, SIZE = "fp8_tests::gate_backward", (4, 64, 128)
UNKNOWN = "fp8_tests.gate_backward.default, which the sensitivity analysis does not know"


@torch.library.custom_op("fp8_tests::gate", mutates_args=())
def gate(x: Tensor, y: Tensor, steepness: float) -> Tensor:
    """y sigmoid(steepness x)."""
    return y * torch.sigmoid(steepness * x)


@torch.library.custom_op(NAME, mutates_args=())
def gate_backward(grad: Tensor, x: Tensor, y: Tensor, steepness: float) -> tuple[Tensor, Tensor]:
    s = torch.sigmoid(steepness * x)
    return grad * y * steepness * s * (1 - s), grad * s


@torch.library.custom_op("fp8_tests::gate_backward_into", mutates_args=("dx", "dy"))
def gate_backward_into(grad: Tensor, x: Tensor, y: Tensor, dx: Tensor, dy: Tensor, steepness: float) -> None:
    for made, into in zip(gate_backward(grad, x, y, steepness), (dx, dy), strict=True):
        into.copy_(made)


gate.register_fake(lambda x, y, steepness: torch.empty_like(x))
gate_backward.register_fake(lambda grad, x, y, steepness: (torch.empty_like(x), torch.empty_like(y)))
gate_backward_into.register_fake(lambda grad, x, y, dx, dy, steepness: None)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.steepness = inputs[2]


gate.register_autograd(
    lambda ctx, g: (*gate_backward(g, *ctx.saved_tensors, ctx.steepness), None), setup_context=_keep
)


class Into(torch.autograd.Function):
    """As the operators of attention's libraries: the backward writes to tensors that it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return gate(x.detach(), y.detach(), 1.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        dx, dy = torch.empty_like(x), torch.empty_like(y)
        gate_backward_into(grad, x, y, dx, dy, 1.0)
        return dx, dy


class Block(nn.Module):
    """``tanh`` in front of an operator of its own: what tanh saves is behind the operator in the backward."""

    def __init__(self, steepness: float = 1.0, operator: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(128, 128, bias=False) for _ in range(3))
        self.steepness, self.operator = steepness, operator or (lambda x, y: gate(x, y, steepness))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        return torch.nn.functional.silu(self.operator(self.b(h), self.c(h)))


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    monkeypatch.setattr(declared, "_declared", {})
    yield
    torch._dynamo.reset()


def trained(model: nn.Module, run: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    run(torch.randn(SIZE)).square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}  # type: ignore[union-attr]


def measured(**settings: Any) -> tuple[float, Report]:
    """dB of the worst gradient, and the report."""
    torch.manual_seed(0)
    model = Block(**settings)
    exact, run = trained(model, model), compiled(model, linears="off")
    found = trained(model, run)
    return min(sqnr_db(exact[name], found[name]) for name in exact), fp8compile.report(model)


def exact_because_of(report: Report, reason: str) -> int:
    return sum(reason in skip.reason for skip in report.notes.skips)


def test_what_such_an_operator_reads_stays_exact_and_what_is_behind_it_need_not() -> None:
    db, report = measured()
    assert db > 30 and len(report.saved) >= 2, "tanh's result and silu's operand"
    (skip, other) = (skip for skip in report.notes.skips if UNKNOWN in skip.reason)
    line = "fp8compile.declare('fp8_tests::gate_backward', smooth=(1, 2)) if it answers small errors with small ones"
    assert skip.reason.endswith(line) and other.reason == skip.reason
    (told,) = report.remarks
    assert told.startswith("taken to be linear in their gradients, as a backward is: fp8_tests::gate_backward;")


def test_a_gradient_that_is_declared_exact_is_assumed_of_nothing() -> None:
    declare(NAME, exact=(0,))
    db, report = measured()
    assert not report.remarks and exact_because_of(report, UNKNOWN) == 3, "x, y, and what the gradient is made of"
    assert db > 30


@pytest.mark.parametrize("op", [NAME, gate_backward, torch.ops.fp8_tests.gate_backward])
@pytest.mark.parametrize("arguments", [(0, 1, 2), ("grad", "x", "y")])
def test_what_is_declared_is_stored(op: Any, arguments: tuple[Any, ...]) -> None:
    _, before = measured()
    torch._dynamo.reset()
    declare(op, linear=arguments[:1], smooth=arguments[1:])
    db, report = measured()
    assert db > 30 and not report.remarks and not exact_because_of(report, UNKNOWN)
    assert report.saved_bytes < before.saved_bytes


def test_an_operator_that_writes_to_its_operands() -> None:
    _, before = measured(operator=Into.apply)
    assert exact_because_of(before, "gate_backward_into") == 2
    torch._dynamo.reset()
    declare("fp8_tests::gate_backward_into", linear=("grad",), smooth=("x", "y"))
    db, report = measured(operator=Into.apply)
    assert db > 30 and not exact_because_of(report, "gate_backward_into")


def test_what_is_written_to_is_no_gradient() -> None:
    """Even where nothing else is unknown: what is in it before may be read."""
    declare("fp8_tests::gate_backward_into", linear=("grad",), smooth=("x", "y"))

    class Kept(Into):
        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            x, y = ctx.saved_tensors
            dx, dy = torch.tanh(x) * grad, torch.empty_like(y)
            gate_backward_into(grad, x, y, dx, dy, 1.0)
            return dx, dy

    _, report = measured(operator=Kept.apply)
    assert exact_because_of(report, "gate_backward_into") == 2, "x, and what the gradient in dx is made of"


def test_a_wrong_declaration_is_seen_by_check() -> None:
    declare(NAME, linear=(0,), smooth=(1, 2))
    torch.manual_seed(0)
    found = {}
    for steepness in (1.0, 3000.0):
        torch._dynamo.reset()
        model = Block(steepness)
        recipe = {"linears": "off", "saved.min_numel": 0, "debug.codegen": "eager"}
        found[steepness] = fp8compile.check(model, (torch.randn(SIZE),), recipe=recipe)
    assert found[1.0].ok and not found[3000.0].ok


def test_errors_of_linear_operands_add_up_and_those_of_smooth_ones_count_twice() -> None:
    graph = torch.fx.Graph()
    g, x = (graph.placeholder(name) for name in ("g", "x"))
    node = graph.call_function(torch.ops.fp8_tests.gate_backward.default, (g, x, x, 1.0))
    assert answer(node, g, True) == ("linear", 1) and answer(node, x, False) == ("exact", 2)
    declare(NAME, linear=("grad", "y"), smooth=("x",))
    assert answer(node, g, False) == ("linear", 1) and answer(node, x, False) == ("smooth", 2)
    read = {g: Error(amplification=3.0), x: Error(amplification=5.0)}
    assert response(node, read, lambda operand: False).amplification == 3 + 2 * 2 * 5


@pytest.mark.parametrize(
    ("op", "given", "message"),
    [
        (
            "fp8_tests::gate_backwards",
            {},
            "there is no operator 'fp8_tests::gate_backwards' Did you mean 'gate_backward'",
        ),
        ("nowhere::to_be_found", {}, "there is no operator 'nowhere::to_be_found'"),
        ("gate_backward", {}, "names are 'namespace::operator'"),
        ("aten::mm", {"linear": (0,)}, "torch's own"),
        (3, {}, "3 is no operator"),
        (NAME, {"smooth": (4,)}, "has no argument 4; it has grad, x, y, steepness"),
        (NAME, {"smooth": (-1,)}, "has no argument -1"),
        (NAME, {"smooth": ("z",)}, "has no argument 'z'"),
        (NAME, {"smooth": (3,)}, "argument 'steepness' is no tensor but float"),
        (NAME, {"smooth": (1,), "exact": ("x",)}, "argument 'x' is declared twice"),
        (NAME, {"linear": (0, 0)}, "argument 'grad' is declared twice"),
    ],
)
def test_what_cannot_be_declared(op: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        declare(op, **given)


def test_two_declarations_of_one_operator_are_the_same_or_refused() -> None:
    before = declarations_key()
    declare(NAME, linear=(0,))
    declare(NAME, linear=("grad",))
    assert declarations_key() != before, "what is compiled depends on it"
    with pytest.raises(ValueError, match=r"was declared as linear=\('grad',\) before, and now as smooth=\('grad',\)"):
        declare(NAME, smooth=(0,))


def test_the_table_has_arguments_by_the_names_that_installed_libraries_give_them() -> None:
    pytest.importorskip("transformers.integrations.moe")
    found = [name for name in KNOWN if name.startswith("transformers::")]
    for name in found:
        op = getattr(torch.ops.transformers, name.partition("::")[2]).default
        assert declared.declaration_of(op) == KNOWN[name]
    assert len(found) == 2


def test_a_schema_that_has_changed_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declared, "KNOWN", {NAME: declared.Declaration(("grad",), ("x", "renamed"))})
    assert declared.declaration_of(torch.ops.fp8_tests.gate_backward.default) is None
    monkeypatch.setattr(declared, "KNOWN", {NAME: declared.Declaration(("grad",), ("x", "y"))})
    _, report = measured()
    assert not report.remarks and not exact_because_of(report, UNKNOWN)
