"""encode_saved: golden, contract (every reason to leave a tensor), declines."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

import fp8compile
from fp8compile.passes.encode_saved import encode_saved
from fp8compile.recipe.context import Context
from fp8compile.recipe.recipe import Recipe
from fp8compile.reporting.entries import SAVED
from tests.support.graphs import forward_of, split_of
from tests.support.measure import compiled, gradient_sqnr, kept_bytes
from tests.support.net import Net

aten = torch.ops.aten


def left(fn: Callable[..., Tensor]) -> dict[str, str]:
    """What was left as it is: op -> reason."""
    return {s.origin.op: s.reason for s in fp8compile.report(fn).notes.skipped(SAVED)}  # type: ignore[arg-type]


def reasons(model: nn.Module, *args: Tensor, **options: object) -> dict[str, str]:
    """What is left in a step of the model."""
    fn = compiled(model, **{"saved.min_numel": 0, **options})
    out = fn(*args)
    out.float().sum().backward()
    return left(fn)


def test_golden_forward_of_two_linears() -> None:
    split = split_of(Net(torch.tanh), torch.randn(128, 64))
    assert_expected_inline(
        forward_of(split),
        """\
primals_1: float32[64, 64]
primals_2: float32[64]
primals_3: float32[128, 64]
primals_4: float32[64, 64]
primals_5: float32[64]
permute: float32[64, 64] = permute(primals_1)
addmm: float32[128, 64] = addmm(primals_2, primals_3, permute)
tanh: float32[128, 64] = tanh(addmm)
view_4: int8[128, 64] = encode(tanh)
convert_element_type_1: bfloat16[128, 1] = encode(tanh)
permute_1: float32[64, 64] = permute(primals_4)
addmm_1: float32[128, 64] = addmm(primals_5, tanh, permute_1)
return addmm_1, primals_3, primals_4, view_4, convert_element_type_1
""",
    )


def test_codes_are_one_byte_and_scales_one_per_group() -> None:
    split = split_of(Net(torch.tanh), torch.randn(128, 64))
    dtypes = [e.forward.meta["val"].dtype for e in split.edges]
    assert dtypes.count(torch.int8) == dtypes.count(torch.bfloat16) == 1
    assert split.saved_bytes() == 128 * 64 + 2 * 128  # a row of 64 is a group


def test_it_is_idempotent() -> None:
    split = split_of(Net(torch.tanh), torch.randn(128, 64))
    before = [e.forward for e in split.edges]
    assert not encode_saved(split, Context(Recipe(saved={"min_numel": 0}))).saved
    assert [e.forward for e in split.edges] == before


@pytest.mark.parametrize(
    ("function", "op", "reason"),
    [
        (lambda h: h[h.argsort(0)[:, 0]], "sort.default[1]", "not worth a kernel"),
        (lambda h: torch.softmax(h * h, -1), None, None),
        (torch.exp, None, None),
        (lambda h: (h * 0.1).exp() + h, "exp.default", None),
        (lambda h: 1 / (h.abs() + 1e-3), None, None),
        (lambda h: h.amax(1, keepdim=True) + h, "amax.default", "statistic"),
    ],
)
def test_what_is_left_and_gradients_stay_good(function, op, reason) -> None:  # type: ignore[no-untyped-def]
    model, x = Net(function), torch.randn(128, 64)
    fn = compiled(model, **{"saved.min_numel": 0})
    worst = min(gradient_sqnr(model, fn, (x,)).values())
    found = left(fn)
    if reason:
        assert op in found and reason in found[op], found
    assert worst > 18, (worst, found)


def test_what_the_backward_exponentiates_stays_exact() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(64, 512)

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(20 * self.a(x), target)

    model, x, target = Loss(), torch.randn(128, 64), torch.randint(512, (128,))
    found = reasons(model, x, target)
    assert any("exponentiated" in r for r in found.values()), found
    torch._dynamo.reset()
    assert min(gradient_sqnr(model, compiled(model), (x, target)).values()) > 60


def test_what_the_backward_divides_by_stays_exact() -> None:
    found = reasons(Net(lambda h: torch.log(h * h * h * h)), torch.randn(128, 64))
    assert any("divided by" in r for r in found.values()), found


def test_what_the_backward_compares_for_equality_stays_exact() -> None:
    def largest(h: Tensor) -> Tensor:
        return torch.where(h == h.amax(1, keepdim=True), h, 0.5 * h)

    model, x = Net(largest), torch.randn(128, 64)
    fn = compiled(model, **{"saved.min_numel": 0})
    assert min(gradient_sqnr(model, fn, (x,)).values()) > 20
    assert not any("amax" in op and "encoded" in r for op, r in left(fn).items())


def test_a_table_is_not_an_activation() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            angles = torch.arange(128)[:, None] / torch.arange(1, 65)
            return torch.tanh(self.a(x) * torch.cos(angles))

    found = reasons(Table(), torch.randn(128, 64))
    assert any("a table or mask" in r for r in found.values()) or not found


def test_values_made_from_parameters_alone_are_left() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64))

        def forward(self, x: Tensor) -> Tensor:
            return x @ torch.linalg.solve(self.weight @ self.weight.T + torch.eye(64), self.weight)

    found = reasons(Normed(), torch.randn(128, 64))
    assert any("parameters alone" in r for r in found.values()), found


def test_what_the_user_puts_in_fp32_stays_fp32() -> None:
    def in_fp32(h: Tensor) -> Tensor:
        return (
            torch.linalg.matrix_norm(h.float()[:, None, :] * h.float()[:, :, None])[:, None] * h.float().cumsum(-1)
        ).to(h.dtype)

    model, x = Net(in_fp32).bfloat16(), torch.randn(128, 64).bfloat16()
    found = reasons(model, x)
    assert any("FP32 inside a 16-bit model" in r for r in found.values()), found


def test_autocast_disabled_is_a_region_in_fp32() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                h = self.a(x)
                with torch.autocast("cpu", enabled=False):
                    h = torch.tanh(self.b(h.float()))
                return self.a(h)

    found = reasons(Mixed(), torch.randn(128, 64))
    assert any("FP32 inside a 16-bit model" in r for r in found.values()), found


def test_the_recipe_can_leave_modules_alone() -> None:
    model = nn.ModuleDict({"first": Net(torch.tanh), "second": Net(torch.tanh)})

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = model

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks["second"](self.blocks["first"](x))

    fn = compiled(Both(), skip=("blocks.first*",), **{"saved.min_numel": 0})
    kept_bytes(model, fn, (torch.randn(128, 64),))
    report = fp8compile.report(fn)
    assert any("Recipe.skip: module 'blocks.first" in s.reason for s in report.skips)
    assert report.saved and not any(s.origin.module.startswith("blocks.first") for s in report.saved)


def test_small_tensors_are_left() -> None:
    found = reasons(Net(torch.tanh), torch.randn(8, 64), **{"saved.min_numel": 4096})
    assert set(found.values()) == {"fewer than 4096 elements"}


@pytest.mark.parametrize("layout", ["channels_last", "transposed", "sliced"])
def test_layouts_come_back_as_they_were(layout: str) -> None:
    def rearranged(h: Tensor) -> Tensor:
        if layout == "channels_last":
            return torch.tanh(h.view(128, 8, 2, 4).contiguous(memory_format=torch.channels_last)).reshape(128, 64)
        if layout == "transposed":
            return torch.tanh(h.t()).t()
        return torch.tanh(torch.cat([h, h], 1)[:, 32:96])

    model, x = Net(rearranged), torch.randn(128, 64)
    assert min(gradient_sqnr(model, compiled(model, **{"saved.min_numel": 0}), (x,)).values()) > 23
