"""store_sums: what takes many tensors, none of them codes, is stored by Inductor's own limit."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fp8compile import _torch as private
from fp8compile.compiler.inductor_options import FUSION
from fp8compile.passes.store_sums import store_sums
from fp8compile.recipe.context import Context
from fp8compile.recipe.recipe import Recipe
from tests.support.graphs import text_of, traced

ROWS, COLUMNS = 64, 32
CAST = torch.ops.prims.convert_element_type.default
Fn = Callable[..., Any]


def stored(gm: GraphModule, recipe: Recipe | None = None, **options: Any) -> list[str]:
    """What is to be stored under our options of Inductor, or others."""
    with torch._inductor.config.patch(FUSION | options):
        store_sums(gm.graph, Context(recipe or Recipe()))
    return [node.name for node in gm.graph.nodes if node.meta.get(private.STORED)]


def sum_of_five(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    total = a + b + c + d + e
    return total.sum(0), total * 2


FIVE = ((ROWS, COLUMNS),) * 5


def test_golden_a_sum_of_five_that_two_kernels_read() -> None:
    gm = traced(sum_of_five, FIVE)
    assert stored(gm) == ["add_3"]
    assert_expected_inline(
        text_of(gm.graph),
        """\
a_1: bfloat16[64, 32]
b_1: bfloat16[64, 32]
c_1: bfloat16[64, 32]
d_1: bfloat16[64, 32]
e_1: bfloat16[64, 32]
add: bfloat16[64, 32] = add(a_1, b_1)
add_1: bfloat16[64, 32] = add(add, c_1)
add_2: bfloat16[64, 32] = add(add_1, d_1)
add_3: bfloat16[64, 32] = add(add_2, e_1)
sum_1: bfloat16[32] = sum.dim_IntList(add_3)
mul: bfloat16[64, 32] = mul(add_3)
return sum_1, mul
""",
    )


def one_reader(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor) -> Tensor:
    return (a + b + c + d + e) * 2


def sum_of_four(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    total = a + b + c + d
    return total.sum(0), total * 2, e


def with_a_matmul(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    """In memory anyway, since a matmul reads it."""
    total = a + b + c + d + e
    return total.sum(0), total @ total.t()


def returned(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    total = a + b + c + d + e
    return total, total * 2


def along_rows(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    """One kernel goes through a row twice."""
    total = a + b + c + d + e
    return total * (total * a).sum(-1, keepdim=True), total.view(-1) * 2


def of_columns(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    """Laid out as a transposed matrix, which Inductor need not do."""
    return sum_of_five(a.t(), b.t(), c.t(), d.t(), e.t())


@pytest.mark.parametrize("fn", [one_reader, sum_of_four, with_a_matmul, returned, along_rows, of_columns])
def test_it_declines(fn: Fn) -> None:
    assert stored(traced(fn, FIVE)) == []


def after_a_matmul(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor) -> Tensor:
    total = a + b + c + d + e
    return total.view(-1) + ((total * total.sum(-1, keepdim=True)) @ e.t() @ a).view(-1)


def after_a_sum_along_rows(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    total = a + b + c + d + e
    scaled = total * total.sum(-1, keepdim=True)
    return scaled.sum(0), total * 2


@pytest.mark.parametrize("fn", [after_a_matmul, after_a_sum_along_rows])
def test_what_several_kernels_read_in_other_ways(fn: Fn) -> None:
    assert stored(traced(fn, FIVE)) == ["add_3"]


def test_nine_tensors_of_one_reader_are_left() -> None:
    """Plain Inductor stores them, which takes a write and a read more."""

    def sum_of(*all_: Tensor) -> Tensor:
        total = all_[0]
        for each in all_[1:]:
            total = total + each
        return total * 2

    assert stored(traced(sum_of, ((ROWS, COLUMNS),) * 9)) == []


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8])
def test_what_takes_codes_has_room(dtype: torch.dtype) -> None:
    def decoded(codes: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        return sum_of_five(CAST(codes, a.dtype), a, b, c, d)

    with FakeTensorMode():
        others = [torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16) for _ in range(4)]
        gm = make_fx(decoded)(torch.empty(ROWS, COLUMNS, dtype=dtype), *others)
    assert stored(gm) == []


def test_a_mask_is_no_code() -> None:
    def masked(mask: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        total = torch.where(mask, a, b) + c + d
        return total.sum(0), total * 2

    with FakeTensorMode():
        others = [torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16) for _ in range(4)]
        gm = make_fx(masked)(torch.empty(ROWS, COLUMNS, dtype=torch.bool), *others)
    assert stored(gm) == ["add_1"]


def test_the_value_before_a_cast_to_fp32_is_stored() -> None:
    def in_float32(*all_: Tensor) -> tuple[Tensor, Tensor]:
        total = CAST(all_[0] + all_[1] + all_[2] + all_[3] + all_[4], torch.float32)
        return total.sum(0), total * 2

    assert stored(traced(in_float32, FIVE)) == ["add_3"]


def images(*all_: Tensor) -> tuple[Tensor, Tensor]:
    total = all_[0] + all_[1] + all_[2] + all_[3] + all_[4]
    return total.sum((0, 2, 3)), total * 2


def convolved(*all_: Tensor) -> tuple[Tensor, Tensor]:
    return images(*all_[:4], torch.conv2d(all_[4], all_[5]))


@pytest.mark.parametrize("fn,format,expected", [
    (images, torch.contiguous_format, ["add_3"]),
    (images, torch.channels_last, []),
    (convolved, torch.channels_last, ["add_3"]),
    (convolved, torch.contiguous_format, []),
])  # fmt: skip
def test_only_where_the_layout_is_known(fn: Fn, format: torch.memory_format, expected: list[str]) -> None:
    with FakeTensorMode():
        values = [torch.empty(2, 8, 4, 4).to(memory_format=format) for _ in range(5)]
        gm = make_fx(fn)(*values, torch.empty(8, 8, 1, 1).to(memory_format=format))
    assert stored(gm) == expected


def test_idempotent_and_off_where_nothing_is_rewritten_or_limits_are_the_users() -> None:
    gm = traced(sum_of_five, FIVE)
    assert stored(gm) == stored(gm) != []
    assert stored(traced(sum_of_five, FIVE), Recipe.preset("off")) == []
    plains = {"realize_reads_threshold": 4, "realize_acc_reads_threshold": 8}
    assert stored(traced(sum_of_five, FIVE), **plains) == []


class Sums(nn.Module):
    """Five layers read one tensor: its gradient is the sum of theirs, read before a matmul of the backward and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(COLUMNS, COLUMNS, bias=False)
        self.linears = nn.ModuleList(nn.Linear(COLUMNS, COLUMNS, bias=False) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        x = x.sin()
        x = x + self.first(x).relu()
        return sum((linear(x).square() for linear in self.linears), torch.zeros(())).mean()


def trained(disabled: str = "") -> tuple[list[Tensor], list[int]]:
    """The loss and gradients of one step in FP32, and how many tensors the kernels of the backward read."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Sums(), torch.randn(2, ROWS, COLUMNS, requires_grad=True)
    options = {"linears": "off", "saved.min_numel": 0}

    def step() -> Tensor:
        loss: Tensor = torch.compile(model, backend="fp8compile", options=options)(x)
        loss.backward()
        return loss

    with torch._inductor.config.patch(disabled_passes=disabled, force_disable_caches=True):
        loss, code = run_and_get_code(step)
    headings = re.findall(r"void\s+kernel\((.*?)\)", code[-1], re.DOTALL)
    read = [len(re.findall(r"in_(?:out_)?ptr\d+", heading)) for heading in headings]
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)], read


def test_one_kernel_adds_what_several_read_and_fp32_stays_bit_for_bit() -> None:
    (ours, read), (without, more) = trained(), trained("store_sums")
    assert sum(n >= 5 for n in read) < sum(n >= 5 for n in more)
    assert all(torch.equal(a, b) for a, b in zip(ours, without, strict=True)), "nothing is rounded"
