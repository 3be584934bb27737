"""encode_saved: what a softmax made sums to 1 when it is decoded; where it does not, and what that is worth."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

import fp8compile
from fp8compile.analysis.sensitivity import Sensitivity
from fp8compile.numerics import E4M3, INT8, Format
from fp8compile.saved.stored import SUMS
from tests.support.graphs import backward_of, split_of
from tests.support.measure import compiled, gradient_sqnr
from tests.support.net import Net

ROWS, KEYS = 128, 64


class Shifted(nn.Module):
    """A softmax of logits to which each row adds a number of its own: its gradient, a row's sum, is 0 in theory."""

    def __init__(self, function: Callable[[Tensor], Tensor] = lambda p: p) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(KEYS, KEYS), nn.Linear(KEYS, KEYS, bias=False)
        self.shift, self.function = nn.Parameter(torch.zeros(ROWS, 1)), function

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.function(torch.softmax(self.a(x) + self.shift, -1)))


def stored(model: nn.Module, *args: Tensor, **options: object) -> list[str]:
    fn = compiled(model, **{"saved.min_numel": 0, "linears": "off", **options})
    fn(*args).float().sum().backward()
    return [each.codec for each in fp8compile.report(fn).saved]


def test_golden_backward_of_a_softmax() -> None:
    split = split_of(Net(lambda h: torch.softmax(h, -1)), torch.randn(128, 64), linears="off")
    assert_expected_inline(
        backward_of(split),
        """\
primals_3: float32[128, 64]
primals_4: float32[64, 64]
div_codes: float8_e4m3fn[128, 64]
div_inv_scale: bfloat16[128, 1]
tangents_1: float32[128, 64]
permute_1: float32[64, 64] = permute(primals_4)
permute_2: float32[64, 64] = permute(permute_1)
mm: float32[128, 64] = mm(tangents_1, permute_2)
permute_3: float32[64, 128] = permute(tangents_1)
mul_2: float32[128, 64] = decode(div_codes, div_inv_scale)
mm_1: float32[64, 64] = mm(permute_3, mul_2)
sum_2: float32[1, 64] = sum.dim_IntList(tangents_1)
view: float32[64] = view(sum_2)
mul: float32[128, 64] = mul(mm, mul_2)
sum_3: float32[128, 1] = sum.dim_IntList(mul)
neg: float32[128, 64] = neg(mul_2)
fma: float32[128, 64] = fma(neg, sum_3, mul)
permute_6: float32[64, 128] = permute(fma)
mm_2: float32[64, 64] = mm(permute_6, primals_3)
sum_4: float32[1, 64] = sum.dim_IntList(fma)
view_1: float32[64] = view(sum_4)
return mm_2, view_1, None, mm_1, view
""",
    )


@pytest.mark.parametrize("saved_format", ["auto", "int8", "e4m3"])
def test_rows_of_the_gradient_sum_to_zero(saved_format: str) -> None:
    model, x = Shifted(), torch.randn(ROWS, KEYS)
    names = stored(model, x, saved=saved_format)
    assert any(SUMS in name for name in names), names
    p = torch.softmax(model.a(x) + model.shift, -1).detach()
    terms = float((p @ model.b.weight.detach().sum(0).abs()).max())  # of one row: sum(p |g|)
    # Sums of n terms are off by n 2^-24 of these, the sum of the decoded p by (n + 3) 2^-24; codes are within twice of p.
    assert (
        model.shift.grad is not None and float(model.shift.grad.abs().max()) < 2 * (4 * KEYS + 3) * 2.0**-24 * terms
    )


@pytest.mark.parametrize("function", [lambda p: p, lambda p: torch.dropout(p, 0.0, True), lambda p: (p * 2).relu()])
def test_gradients_stay_good(function: Callable[[Tensor], Tensor]) -> None:
    model, x = Shifted(function), torch.randn(ROWS, KEYS)
    found = gradient_sqnr(model, compiled(model, linears="off", **{"saved.min_numel": 0}), (x,))
    found.pop("shift")  # zero in theory
    assert min(found.values()) > 25, found


class Beside(Shifted):
    """The function's result is added to what the second linear makes of the softmax."""

    def forward(self, x: Tensor) -> Tensor:
        p = torch.softmax(self.a(x) + self.shift, -1)
        return self.b(p) + self.function(p)


def test_it_is_restored_for_all_that_reads_it() -> None:
    (name,) = stored(Beside(lambda p: p * p), torch.randn(ROWS, KEYS))
    assert SUMS in name


def test_not_where_the_size_of_its_error_was_proven_in_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sensitivity, "needs_no_range", lambda self, used, fmt: False)
    (name,) = stored(Shifted(), torch.randn(ROWS, KEYS))
    assert SUMS not in name


@pytest.mark.parametrize("fmt", [E4M3, INT8], ids=str)
def test_a_distance_from_a_pole_is_proven_of_a_code_and_not_of_what_is_made_of_it(fmt: Format) -> None:
    model = Shifted(lambda p: torch.log(3 + p.tanh()) * p.tanh())
    split = split_of(model, torch.randn(ROWS, KEYS), linears="off", disabled="encode_saved")
    (tanh,) = split.bw.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default)
    known = Sensitivity(split)
    assert known.reason_to_stay_exact(tanh, fmt) is None and not known.needs_no_range(tanh, fmt)


def test_what_is_read_by_a_logarithm_stays_exact() -> None:
    assert not stored(Beside(torch.log), torch.randn(ROWS, KEYS))
