"""store_residuals: a residual read before a matmul and after it is stored; what is stored anyway, or cheap, is left."""

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
from fp8compile.fx.graph import SAVED_AS_CODES
from fp8compile.passes.store_residuals import store_residuals
from fp8compile.recipe.context import Context
from fp8compile.recipe.recipe import Recipe
from tests.support.graphs import text_of

ROWS, COLUMNS = 64, 32
CAST = torch.ops.prims.convert_element_type.default
Fn = Callable[[Tensor, Tensor, Tensor], Any]


def traced(fn: Fn, shape: tuple[int, ...] = (ROWS, COLUMNS), dtype: torch.dtype = torch.bfloat16) -> GraphModule:
    with FakeTensorMode():
        x, a = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)
        gm: GraphModule = make_fx(fn)(x, a, torch.empty(COLUMNS, COLUMNS, dtype=dtype))
    return gm


def stored(gm: GraphModule, recipe: Recipe | None = None, saved: tuple[str, ...] | None = None) -> list[str]:
    """What is to be stored, where all values, or those named in ``saved``, are saved as codes."""
    for node in gm.graph.nodes:
        node.meta |= {SAVED_AS_CODES: True} if saved is None or node.name in saved else {}
    store_residuals(gm.graph, Context(recipe or Recipe()))
    return [node.name for node in gm.graph.nodes if node.meta.get(private.STORED)]


def normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True))


def two_layers(x: Tensor, a: Tensor, w: Tensor) -> tuple[Tensor]:
    x = x + a @ w
    x = x + normed(x) @ w
    return (normed(x + normed(x) @ w) @ w,)


def test_golden_each_residual_but_the_last_is_stored() -> None:
    gm = traced(two_layers)
    marked = stored(gm)
    assert marked == ["add", "add_1"]
    assert_expected_inline(
        text_of(gm.graph),
        """\
x_1: bfloat16[64, 32]
a_1: bfloat16[64, 32]
w_1: bfloat16[32, 32]
mm: bfloat16[64, 32] = mm(a_1, w_1)
add: bfloat16[64, 32] = add(x_1, mm)
mul: bfloat16[64, 32] = mul(add, add)
mean: bfloat16[64, 1] = mean.dim(mul)
rsqrt: bfloat16[64, 1] = rsqrt(mean)
mul_1: bfloat16[64, 32] = mul(add, rsqrt)
mm_1: bfloat16[64, 32] = mm(mul_1, w_1)
add_1: bfloat16[64, 32] = add(add, mm_1)
mul_2: bfloat16[64, 32] = mul(add_1, add_1)
mean_1: bfloat16[64, 1] = mean.dim(mul_2)
rsqrt_1: bfloat16[64, 1] = rsqrt(mean_1)
mul_3: bfloat16[64, 32] = mul(add_1, rsqrt_1)
mm_2: bfloat16[64, 32] = mm(mul_3, w_1)
add_2: bfloat16[64, 32] = add(add_1, mm_2)
mul_4: bfloat16[64, 32] = mul(add_2, add_2)
mean_2: bfloat16[64, 1] = mean.dim(mul_4)
rsqrt_2: bfloat16[64, 1] = rsqrt(mean_2)
mul_5: bfloat16[64, 32] = mul(add_2, rsqrt_2)
mm_3: bfloat16[64, 32] = mm(mul_5, w_1)
return mm_3
""",
    )


def in_float32(x: Tensor, a: Tensor, w: Tensor) -> Tensor:
    """A 16-bit stream that is added to in FP32."""
    x = x + a @ w
    return CAST(CAST(x, torch.float32) + CAST(normed(x) @ w, torch.float32), torch.bfloat16) @ w


def seen_by_views(x: Tensor, a: Tensor, w: Tensor) -> Tensor:
    x = x + a @ w
    return (x.view(-1) + (normed(x.view(2, -1, COLUMNS)) @ w).view(-1)).view(ROWS, COLUMNS) @ w


@pytest.mark.parametrize("fn", [in_float32, seen_by_views])
def test_it_sees_through(fn: Fn) -> None:
    assert stored(traced(fn)) == ["add"]


def without_a_matmul_between(x: Tensor, a: Tensor, w: Tensor) -> Tensor:
    x = x + a @ w
    return (x + normed(x)) @ w


def read_by_the_matmul(x: Tensor, a: Tensor, w: Tensor) -> Tensor:
    x = x + a @ w
    return (x + x @ w) @ w


def of_the_caller(x: Tensor, a: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    x = x + a @ w
    return x, (x + normed(x) @ w) @ w


def of_one_tensor(x: Tensor, a: Tensor, w: Tensor) -> Tensor:
    """An activation takes as many bytes to read as what it is made from."""
    x = torch.relu(a @ w)
    return (x + normed(x) @ w) @ w


def an_input(x: Tensor, a: Tensor, w: Tensor) -> Tensor:
    return (x + normed(x) @ w) @ w


@pytest.mark.parametrize("fn", [without_a_matmul_between, read_by_the_matmul, of_the_caller, of_one_tensor, an_input])
def test_it_declines(fn: Fn) -> None:
    assert stored(traced(fn)) == []


def in_four_dimensions(x: Tensor, a: Tensor, w: Tensor) -> Tensor:
    x = x + a @ w
    return (x + normed(x) @ w) @ w


def test_a_memory_format_is_left_to_inductor() -> None:
    assert stored(traced(in_four_dimensions)) == ["add"]
    assert stored(traced(in_four_dimensions, (2, 8, 4, COLUMNS))) == []


def of_codes(codes: Tensor, scales: Tensor, w: Tensor) -> Tensor:
    x = CAST(codes, torch.bfloat16) * scales[:, :1]
    return (x + normed(x) @ w) @ w


def test_a_decode_reads_fewer_bytes_than_it_makes() -> None:
    with FakeTensorMode():
        codes, scales = (
            torch.empty(ROWS, COLUMNS, dtype=torch.float8_e4m3fn),
            torch.empty(ROWS, 2, dtype=torch.bfloat16),
        )
        gm = make_fx(of_codes)(codes, scales, torch.empty(COLUMNS, COLUMNS, dtype=torch.bfloat16))
    assert stored(gm) == []


def test_what_plain_inductor_does_not_save_is_left() -> None:
    assert stored(traced(two_layers), saved=("add_1", "mm")) == ["add_1"]


def test_it_is_idempotent_and_a_recipe_that_rewrites_nothing_leaves_all() -> None:
    gm = traced(two_layers)
    assert stored(gm) == stored(gm) != []
    assert stored(traced(two_layers), Recipe.preset("off")) == []


class Deep(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(COLUMNS) for _ in range(layers))
        self.linears = nn.ModuleList(nn.Linear(COLUMNS, COLUMNS, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for norm, linear in zip(self.norms, self.linears, strict=True):
            x = x + linear(norm(x))  # of three dimensions: in two, Inductor adds in the matmul's own kernel
        return x.square().mean()


def trained(layers: int, disabled: str = "") -> tuple[list[Tensor], str]:
    """The loss and the gradients of one step in FP32, and the generated code of the forward."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Deep(layers), torch.randn(2, ROWS, COLUMNS)
    options = {"linears": "off", "saved.min_numel": 0}
    with torch._inductor.config.patch(disabled_passes=disabled, force_disable_caches=True):
        loss, code = run_and_get_code(torch.compile(model, backend="fp8compile", options=options), x)
        loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)], code[0]


def most_read(code: str) -> int:
    """The most tensors that one kernel of generated C++ code is given."""
    headings = re.findall(r"void\s+kernel\((.*?)\)", code, re.DOTALL)
    return max(len(re.findall(r"in_(?:out_)?ptr\d+", heading)) for heading in headings)


def test_no_norm_reads_the_results_of_all_matmuls_before_it_and_fp32_stays_bit_for_bit() -> None:
    (ours, code), (without, theirs) = trained(6), trained(6, disabled="store_residuals")
    assert most_read(code) == most_read(trained(3)[1]) < most_read(theirs)
    assert all(torch.equal(a, b) for a, b in zip(ours, without, strict=True)), "nothing is rounded"
