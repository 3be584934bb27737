"""Smoothed channels of silu(g) * u: what becomes of the graph, where it is declined, and that the function is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

import fp8compile
from fp8compile.compiler.inductor import NOTHING_TO_SMOOTH
from fp8compile.fx.ops import opname
from fp8compile.linears import smooth_swiglu as reasons
from fp8compile.linears.operands import Operands
from fp8compile.numerics.smoothing import channel_amax, channel_exponents
from fp8compile.passes.quantize_linears import quantize_linears
from fp8compile.recipe.context import Context
from fp8compile.recipe.recipe import Recipe
from tests.support.graphs import joint_of, split_of, text_of
from tests.support.measure import compiled, gradients, matmul_entries
from tests.support.reference import sqnr_db

LARGE = [3, 40]  # channels


class Gated(nn.Module):
    """``made(gate, up)`` read by a linear; two channels of up are 2**10 times as large."""

    def __init__(
        self, made: Callable[[Tensor, Tensor], Tensor] = lambda g, u: F.silu(g) * u, factor: float = 2.0**10
    ):
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up = (nn.Linear(32, 64, bias=False) for _ in range(2))
        self.down, self.made = nn.Linear(64, 32, bias=False), made
        with torch.no_grad():
            self.up.weight[LARGE] *= factor
            self.down.weight[:, LARGE] /= factor

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.made(self.gate(x), self.up(x)))
        return y


def data(rows: int = 48, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(1), dtype=dtype).requires_grad_()


def told(model: nn.Module, *args: Tensor, **fields: Any) -> dict[str, str]:
    """By linear and direction, what the report says of smoothing."""
    torch._dynamo.reset()
    asked = {"debug.codegen": "eager", "linears.emulate": True, "linears.smooth_swiglu": True, **fields}
    recipe = Recipe().changed(asked)  # not judged as what is written
    torch.compile(model, backend="fp8compile", options={"recipe": recipe})(*args)
    found = matmul_entries(fp8compile.report(model))
    formats = {f"{x.origin.module} {x.direction}": getattr(x, "formats", "") for x in found}
    return {
        name: text[text.index(", ", 1) :].split(", emulated")[-1]
        for name, text in formats.items()
        if "smooth" in text
    }


def why_not(model: nn.Module, *args: Tensor, **fields: Any) -> str:
    """Why ``down`` is not smoothed."""
    found = told(model, *args, **fields)
    text = found.get("down forward") or found[" forward"]  # of a matmul that is no module
    assert text.startswith(", not smoothed: ")
    return text.removeprefix(", not smoothed: ")


def exact_codecs() -> Any:
    """Operands stay as they are, so that only the scales of channels are left."""
    return mock.patch.object(Operands, "decoded", lambda self, operand, side, how: operand)


# ------------------------------------------------------------------------------------------------- the graph


def test_golden_of_the_forward() -> None:
    """The forward's input is divided, its weight multiplied; the amax of the input is that of its channels."""
    graph = joint_of(
        Gated().requires_grad_(False), data(), saved="off", **{"linears.emulate": True, "linears.smooth_swiglu": True}
    )
    lines = text_of(graph).splitlines()
    of_down = [line for line in lines if any(name in line for name in ("statistics(", "multiplied(", "divided("))]
    assert_expected_inline(
        "\n".join(of_down),
        """\
clamp_max: int32[64] = statistics(mul)
mul_10: float32[32, 64] = multiplied(primals_4, clamp_max)
amax_1: float32[] = statistics(mul)
mul_9: float32[48, 64] = statistics(mul)
mul_11: float32[48, 64] = divided(mm_3, clamp_max)""",
    )


def test_three_matmuls_are_smoothed_and_no_other() -> None:
    not_gated = f", not smoothed: {reasons.NOT_GATED}"
    smoothed = {f"down {direction}": ", smoothed" for direction in ("forward", "dgrad", "wgrad")}
    assert told(Gated(), data()) == smoothed | {"gate forward": not_gated, "up forward": not_gated}
    assert told(Gated(), data(), **{"linears.smooth_swiglu": False}) == {}


def test_it_is_idempotent() -> None:
    model, x = Gated(), data()
    graph = joint_of(model, x, **{"linears.emulate": True, "linears.smooth_swiglu": True})
    before = len(graph.nodes)
    context = Context(Recipe(linears={"emulate": True, "smooth_swiglu": True}), frozenset(range(4)))
    assert not quantize_linears(graph, context).linears
    graph.eliminate_dead_code()
    assert len(graph.nodes) == before


def test_no_pass_over_the_input_finds_its_amax_anew() -> None:
    graphs = [
        joint_of(Gated(), data(), **{"linears.emulate": True, "linears.smooth_swiglu": each})
        for each in (False, True)
    ]
    plain, smooth = (
        [n for n in g.nodes if opname(n) == "amax" and n.args[0].meta["val"].shape == (48, 64)] for g in graphs
    )
    assert len(smooth) == len(plain)


@pytest.mark.parametrize("banned", [True, False])
def test_the_backward_is_given_the_exponents_and_makes_none(banned: bool) -> None:
    """Gate and up are stored as codes: exponents of these could be others than those of the forward's codes. Also where the
    cut may repeat reductions in the backward, which it bans by default."""
    with torch._functorch.config.patch(ban_recompute_reductions=banned):
        split = split_of(Gated(), data(), **{"linears.emulate": True, "linears.smooth_swiglu": True})
    assert [opname(n) for n in split.fw.graph.nodes].count("__rshift__") == 2  # of amaxes, and the half
    assert "__rshift__" not in [opname(n) for n in split.bw.graph.nodes]
    given = [n.meta["val"] for n in split.bw.graph.nodes if n.op == "placeholder"]
    assert [value.shape for value in given if value.dtype == torch.int32] == [(64,)]


# ------------------------------------------------------------------------------------------------- declined


@pytest.mark.parametrize(
    "made", [lambda g, u: F.silu(g) * u, lambda g, u: u * F.gelu(g), lambda g, u: F.gelu(g, approximate="tanh") * u]
)
def test_gated_products_are_smoothed(made: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert told(Gated(made), data())["down forward"] == ", smoothed"


def other_products() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    return {
        "no product": lambda g, u: F.silu(g),
        "another activation": lambda g, u: torch.tanh(g) * u,
        "a product with a row": lambda g, u: F.silu(g) * u[:1],
        "a sum of products": lambda g, u: F.silu(g) * u + u,
    }


@pytest.mark.parametrize("name", other_products())
def test_other_inputs_are_left(name: str) -> None:
    assert why_not(Gated(other_products()[name]), data()) == reasons.NOT_GATED


def test_recipes_that_are_not_smoothed() -> None:
    model, x = Gated(), data()
    assert why_not(model, x, **{"linears.scaling": "delayed"}) == reasons.DELAYED
    assert why_not(model, x, **{"linears.cache_weights": True}) == reasons.CACHED
    assert why_not(model, x, linears="rowwise") == reasons.NOT_TENSORWISE.format("rowwise")


def test_a_recipe_without_such_linears_is_remarked_on() -> None:
    for fields, remarked in (({"linears.scaling": "delayed"}, True), ({}, False)):
        torch._dynamo.reset()
        model = nn.Linear(32, 32)
        recipe = Recipe().changed(
            {"debug.codegen": "eager", "linears.emulate": True, "linears.smooth_swiglu": True, **fields}
        )
        torch.compile(model, backend="fp8compile", options={"recipe": recipe})(data())
        assert (NOTHING_TO_SMOOTH in fp8compile.report(model).remarks) == remarked


def test_fp16_is_left() -> None:
    assert (
        why_not(Gated(factor=4).half(), data(dtype=torch.float16), fp32="off", **{"fp32.observe": False})
        == reasons.FP16
    )


class Twice(Gated):
    """The product goes elsewhere too."""

    def __init__(self, read: Callable[[Twice, Tensor], Tensor]) -> None:
        super().__init__()
        self.other, self.read = nn.Linear(64, 32, bias=False), read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self, F.silu(self.gate(x)) * self.up(x))


def test_what_others_read_is_left() -> None:
    x = data()
    assert why_not(Twice(lambda m, h: m.down(h) + m.other(h)), x) == reasons.SHARED
    assert why_not(Twice(lambda m, h: m.down(h) + h[:, :32]), x) == reasons.READ_ELSEWHERE
    assert why_not(Twice(lambda m, h: m.down(h) + m.down.weight.sum()), x) == reasons.WEIGHT_READ_ELSEWHERE
    assert (
        why_not(Twice(lambda m, h: torch.mm(h.view(24, 128), m.down.weight.view(16, 128).t())), x)
        == reasons.NOT_CHANNELS
    )
    assert why_not(Twice(lambda m, h: torch.mm(h, m.down.weight.view(64, 32))), x) == reasons.WEIGHT_LAID_OUT


# -------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("saved", ["off", "auto"])
def test_without_codes_the_function_is_kept_to_the_bit(dtype: torch.dtype, saved: str) -> None:
    """Powers of two move between factors whose product stays the same number (numerics/smoothing.py)."""
    model, x, found = Gated().to(dtype), data(dtype=dtype), []
    h = F.silu(model.gate(x)) * model.up(x)
    assert int(channel_exponents(channel_amax(h)).max()) >= 4, "otherwise there is nothing to keep"
    for smooth in (False, True):
        torch._dynamo.reset()
        with exact_codecs():
            run = compiled(
                model, saved=saved, **{"linears.emulate": True, "saved.min_numel": 0, "linears.smooth_swiglu": smooth}
            )
            found.append(gradients(model, run, (x,)) | {"out": run(x).detach()})
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name


def test_channels_under_the_format_s_reach_come_back() -> None:
    """Two channels are 2**16 times as large, so that all others are E4M3's subnormal numbers, or zeros. With half of it moved
    none is: the gradient of each column of the weight is as good as if no channel were large. Gate and up are left: the rows
    of their weights are as far apart, which is another matter."""
    others = {"gate": {"linears": "off"}, "up": {"linears": "off"}}
    x, found = data(512), {}
    for name, factor, smooth in (("even", 1.0, False), ("plain", 2.0**16, False), ("smooth", 2.0**16, True)):
        torch._dynamo.reset()
        model = Gated(factor=factor)
        run = compiled(
            model, saved="off", modules=others, **{"linears.emulate": True, "linears.smooth_swiglu": smooth}
        )
        exact, ours = (gradients(model, each, (x,))["down.weight"].double() for each in (model, run))
        columns = [sqnr_db(exact[:, i], ours[:, i]) for i in range(64) if i not in LARGE]
        found[name] = sorted(columns)[len(columns) // 2]
    assert found["plain"] < found["even"] - 6 and abs(found["smooth"] - found["even"]) < 1, found


def test_scaled_matmuls_do_what_emulated_ones_do() -> None:
    model, x, found = Gated(), data(), []
    for emulate in (True, False):
        torch._dynamo.reset()
        with mock.patch("fp8compile.linears.reasons.fp8_unsupported_reason", lambda device: None):
            run = compiled(model, saved="off", **{"linears.emulate": emulate, "linears.smooth_swiglu": True})
            found.append(gradients(model, run, (x,)))
    for name, value in found[0].items():
        assert torch.allclose(value, found[1][name], rtol=1e-5, atol=1e-6 * float(value.abs().max())), name


@pytest.mark.sweep
def test_compiled_by_inductor_it_is_the_same() -> None:
    model, x, found = Gated(), data(), []
    for codegen in ("eager", "inductor"):
        torch._dynamo.reset()
        found.append(
            gradients(
                model,
                compiled(model, **{"linears.emulate": True, "linears.smooth_swiglu": True, "debug.codegen": codegen}),
                (x,),
            )
        )
    for name, value in found[0].items():
        assert sqnr_db(value.double(), found[1][name]) > 40, name
