"""share_sigmoids: a SiLU beside a sigmoid of its value is their product; one without, or of another value, is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fp8compile.passes.share_sigmoids import share_sigmoids
from fp8compile.recipe.context import Context
from fp8compile.recipe.recipe import Recipe
from tests.support.graphs import text_of

CAST = torch.ops.prims.convert_element_type.default
ONE_ROUNDING, TINY = 2.0**-24, 2.0**-126
Fn = Callable[..., Any]


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def silu_gradient(g: Tensor, x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return g * s * (1 + x * (1 - s))


def traced(fn: Fn, *dtypes: torch.dtype) -> GraphModule:
    with FakeTensorMode():
        gm: GraphModule = make_fx(fn)(*(torch.empty(4, 8, dtype=dtype) for dtype in dtypes))
    return gm


def shared(fn: Fn, *dtypes: torch.dtype, recipe: Recipe | None = None) -> list[str]:
    """The names of the operations of a graph behind the pass."""
    gm = traced(fn, *dtypes)
    share_sigmoids(gm.graph, Context(recipe or Recipe()))
    gm.graph.lint()
    return [node.target._opname for node in gm.graph.nodes if node.op == "call_function"]


def gated(g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return g * silu(x), silu_gradient(g, x)


F32 = torch.float32


def test_golden_a_gate_and_its_gradient() -> None:
    gm = traced(gated, F32, F32)
    share_sigmoids(gm.graph, Context(Recipe()))
    assert_expected_inline(
        text_of(gm.graph),
        """\
g_1: float32[4, 8]
x_1: float32[4, 8]
mul_4: float32[4, 8] = _silu(x_1)
mul: float32[4, 8] = mul(g_1, mul_4)
sigmoid: float32[4, 8] = sigmoid(x_1)
mul_1: float32[4, 8] = mul(g_1, sigmoid)
rsub: float32[4, 8] = rsub(sigmoid)
mul_2: float32[4, 8] = mul(x_1, rsub)
add_1: float32[4, 8] = add(mul_2)
mul_3: float32[4, 8] = mul(mul_1, add_1)
return mul, mul_3
""",
    )


def decoded_twice(g: Tensor, codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Each reader decodes what was saved by itself."""
    return g * silu(CAST(codes, F32) * scale), silu_gradient(g, CAST(codes, F32) * scale)


def test_copies_of_a_decode_are_one_value() -> None:
    names = shared(decoded_twice, F32, torch.int8, F32)
    assert names.count("sigmoid") == 2 and "exp" not in names, "Inductor computes one of them in a kernel"


def test_what_others_read_of_the_quotient_stays() -> None:
    def read(g: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        e = torch.exp(-x)
        return x / (1 + e), silu_gradient(g, x), e

    names = shared(read, F32, F32)
    assert names.count("exp") == 1 and "div" not in names


def forward_alone(g: Tensor, x: Tensor) -> Tensor:
    return g * silu(x)


def of_another(g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return silu(g), silu_gradient(g, x)


def of_another_decode(g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return silu(x * 2), silu_gradient(g, x * 3)


def of_other_randoms(g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Calls that are alike, and each another draw."""
    return silu(torch.rand_like(x)), silu_gradient(g, torch.rand_like(x))


def no_silu(g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return x / (2 + torch.exp(-x)), silu_gradient(g, x)


def of_a_positive_power(g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return x / (1 + torch.exp(x)), silu_gradient(g, x)


def of_two_values(g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return x / (1 + torch.exp(-g)), silu_gradient(g, x)


@pytest.mark.parametrize(
    "fn",
    [forward_alone, of_another, of_another_decode, of_other_randoms, no_silu, of_a_positive_power, of_two_values],
)
def test_it_declines(fn: Fn) -> None:
    assert "div" in shared(fn, F32, F32)


def test_another_dtype_and_a_recipe_that_rewrites_nothing_are_left() -> None:
    assert "div" in shared(gated, torch.bfloat16, torch.bfloat16)
    assert "div" in shared(gated, torch.float64, torch.float64)
    assert "div" in shared(gated, F32, F32, recipe=Recipe.preset("off"))


def test_idempotent() -> None:
    gm = traced(gated, F32, F32)
    share_sigmoids(gm.graph, Context(Recipe()))
    text = text_of(gm.graph)
    share_sigmoids(gm.graph, Context(Recipe()))
    assert text_of(gm.graph) == text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_sixteen_bit_value_is_off_by_its_roundings(dtype: torch.dtype) -> None:
    """The sigmoid is rounded four times at most: exp (within a unit in the last place, two roundings), sum, quotient."""
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    gm = make_fx(gated)(torch.ones_like(x), x)
    share_sigmoids(gm.graph, Context(Recipe()))
    gm.recompile()
    found = gm(torch.ones_like(x), x)[0]
    quotient, exact, sigmoid = silu(x), silu(x.double()), torch.sigmoid(x.double())
    assert torch.equal(found.isnan(), quotient.isnan()) and torch.equal(
        found[x == torch.inf], quotient[x == torch.inf]
    )
    is_normal = x.isfinite() & (sigmoid >= TINY)
    off = (found.double() - exact).abs()
    assert (off / exact.abs())[is_normal & (x != 0)].max() <= 5 * ONE_ROUNDING
    assert (off / x.abs())[x.isfinite() & ~is_normal].max() <= TINY, (
        "the sigmoid is below what FP32 holds to all its places"
    )
