"""quantize_linears in INT8: graphs, declines, numbers."""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.fx import Graph

import fp8compile
from fp8compile import _torch as private
from fp8compile.fx.graph import ENCODING, SPLICED, copy_graph
from fp8compile.linears.device import int8_unsupported_reason
from fp8compile.linears.integer_matmuls import reason_against_integers
from fp8compile.numerics import INT8, Blocks, Codec
from fp8compile.numerics.integer_products import MOST_PRODUCTS
from fp8compile.passes.quantize_linears import quantize_linears
from fp8compile.recipe.context import Context
from fp8compile.recipe.recipe import Recipe
from fp8compile.reporting.entries import Linear, Skip
from tests.support.graphs import joint_of, text_of
from tests.support.integers import ROWS, OnTheLeft, linears_of, product
from tests.support.measure import compiled, gradient_sqnr, llama_case, matmul_entries, why

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("vnni")
SQUARE = Blocks(INT8, 32, 32)
LLAMA = (2, 64, 64, 64, 4)  # batch, tokens, hidden, inner and heads of a layer whose linears are all of one shape
SIZES = [(256, 128, 384), (300, 144, 80), (37, 10, 7)]  # M, K, N: even ones, any M, nothing even


def encodings(graph: Graph) -> list[str]:
    """What is encoded by what codec, one entry for each encoding."""
    codes = [n for n in graph.nodes if ENCODING in n.meta and n.meta["val"].dtype == torch.int8]
    return [f"{n.meta[SPLICED]} {n.meta[ENCODING].codec}" for n in codes]


@functools.cache
def llama(emulate: bool) -> tuple[Graph, list[Linear | Skip]]:
    """The joint graph of a layer, which no test changes, and what is told of its matmuls."""
    layer, args = llama_case(*LLAMA)
    graph = joint_of(layer, *args, linears="int8", **{"linears.emulate": emulate})
    return graph, matmul_entries(fp8compile.report(layer))


def fake(codec: Codec, x: Tensor) -> Tensor:
    return codec.decode(*codec.encode(x.detach()), x.dtype)


# ------------------------------------------------------------------------------------------------------- graphs


def test_golden_joint_graph_of_a_linear_in_int8() -> None:
    assert_expected_inline(
        text_of(joint_of(nn.Linear(64, 24, bias=False), torch.randn(160, 64), linears="int8")),
        """\
primals_1: float32[24, 64]
primals_2: float32[160, 64]
tangents_1: float32[160, 24]
permute_11: float32[1, 64] = encode(primals_2)
convert_element_type_4: int8[160, 64] = encode(primals_2)
permute_7: float32[1, 24] = encode(tangents_1)
convert_element_type_3: int8[160, 24] = encode(tangents_1)
where_1: float32[24, 1] = encode(primals_1)
convert_element_type_1: int8[24, 64] = encode(primals_1)
where: float32[160, 1] = encode(primals_2)
convert_element_type: int8[160, 64] = encode(primals_2)
permute_5: float32[1, 24] = permute(where_1)
permute_4: int8[64, 24] = permute(convert_element_type_1)
mul_5: float32[160, 24] = int_mm(convert_element_type, permute_4, where, permute_5)
permute_9: float32[24, 1] = permute(permute_7)
permute_8: int8[24, 160] = permute(convert_element_type_3)
mul_11: float32[24, 64] = int_mm(permute_8, convert_element_type_4, permute_9, permute_11)
return mul_5, mul_11, None
""",
    )


def test_all_matmuls_are_products_of_integers_and_an_encoding_serves_all_who_contract_a_value_alike() -> None:
    """4 activations, 7 gradients and 7 weights, each along both of its dimensions."""
    graph, _ = llama(False)
    targets = [node.target for node in graph.nodes]
    assert targets.count(aten._int_mm.default) == 21 and not {aten.mm.default, aten.addmm.default} & {*targets}
    assert len(encodings(graph)) == (4 + 7 + 7) * 2


@pytest.mark.parametrize(
    ("fields", "formats"),
    [
        ({}, "int8 x int8 rowwise"),
        ({"linears.emulate": True}, "int8 x int8 rowwise, emulated"),
    ],
    ids=str,
)
def test_every_matmul_is_rewritten_and_named(fields: dict[str, Any], formats: str) -> None:
    _, found = llama("linears.emulate" in fields)
    assert len(found) == 21 and {x.formats for x in found if isinstance(x, Linear)} == {formats}


def test_the_report_says_int8() -> None:
    report = fp8compile.explain(nn.Linear(64, 64), (torch.randn(32, 64),), recipe={"linears": "int8"})
    assert "linears: 2 of 2 matmuls in INT8" in str(report)


def test_it_is_idempotent() -> None:
    shared, _ = llama(False)
    assert shared.owning_module is not None
    graph = copy_graph(shared.owning_module).graph
    before = len(graph.nodes)
    layer, args = llama_case(*LLAMA)
    context = Context(Recipe(linears="int8"), frozenset(range(len(list(layer.parameters())) + len(args))))
    assert not quantize_linears(graph, context).linears
    graph.eliminate_dead_code()
    assert len(graph.nodes) == before


# ------------------------------------------------------------------------------------------------------ declines


def test_a_cpu_without_vnni_is_left_and_told() -> None:
    model, x = nn.Linear(64, 64), torch.randn(32, 64)
    with mock.patch.object(private, "cpu_has_vnni", lambda: False):
        (reason,) = {why(told) for told in linears_of(model, x)}
        assert {why(told) for told in linears_of(model, x, **{"linears.emulate": True})} == {""}
    assert reason == "this CPU has no AVX512 VNNI for INT8 products (linears.emulate=True decodes and multiplies)"


def test_devices_without_int8_products_are_told() -> None:
    cuda = torch.device("cuda")
    for capability, reason in (((7, 5), "compute capability 7.5 is not supported by linears='int8'"), ((8, 0), None)):
        with mock.patch.object(torch.cuda, "get_device_capability", return_value=capability):
            assert (int8_unsupported_reason(cuda) or "").startswith(reason or "") is True
            assert (int8_unsupported_reason(cuda) is None) is (reason is None)
    assert str(int8_unsupported_reason(torch.device("mps"))).startswith("mps has no INT8 products that were tried")
    with mock.patch.object(torch.version, "hip", "6.0"):
        assert int8_unsupported_reason(cuda) is not None


@pytest.mark.parametrize(
    ("left", "right", "reason"),
    [
        ((17, 24), (24, 8), None),
        ((16, 24), (24, 8), "16 rows of its left operand: on a GPU torch._int_mm takes more than 16"),
        ((17, 23), (23, 8), None),  # filled up
        ((17, 24), (24, 12), "12 columns of its right operand: on a GPU torch._int_mm takes multiples of 8"),
    ],
    ids=str,
)
def test_what_a_gpu_does_not_multiply(left: tuple[int, int], right: tuple[int, int], reason: str | None) -> None:
    def operands(device: str) -> Any:
        values = [torch.empty(s, device="meta") for s in (left, right)]
        faked = [SimpleNamespace(shape=v.shape, device=torch.device(device)) for v in values]
        return SimpleNamespace(operands=tuple(SimpleNamespace(meta={"val": v}) for v in faked))

    recipe = Recipe(linears="int8")
    assert reason_against_integers(operands("cuda"), recipe) == reason
    assert reason_against_integers(operands("cpu"), recipe) is None
    assert reason_against_integers(operands("cuda"), Recipe(linears={"mode": "int8", "emulate": True})) is None


def test_a_wgrad_over_rows_that_vary_is_left() -> None:
    model = nn.Linear(64, 32)
    fn = torch.compile(
        model, backend="fp8compile", options={"debug.codegen": "eager", "linears": "int8"}, dynamic=True
    )
    x = torch.randn(40, 64, requires_grad=True)
    y = fn(x)
    dx, dw = torch.autograd.grad(y, (x, model.weight), dy := torch.randn(40, 32))
    assert torch.equal(y, product(x, model.weight, model.bias)) and torch.equal(dw, dy.t() @ x)
    assert torch.equal(dx, product(dy, model.weight.t()))
    reasons = {told.direction: why(told) for told in matmul_entries(fp8compile.report(fn))}
    assert reasons == {
        **{"forward": "", "dgrad": ""},
        "wgrad": "rows that vary from call to call: an INT32 sum of the wgrad holds 133,144 of them",
    }
    assert fn(torch.randn(0, 64)).shape == (0, 32)


@pytest.mark.parametrize("fields", [{}, {"linears.emulate": True}], ids=str)
def test_a_model_that_is_left_as_it_is(fields: dict[str, Any]) -> None:
    """Tied to an embedding, in float64, without rows; sizes that FP8 does not take are no reason."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(64, 32)

        def forward(self, tokens: Tensor) -> Tensor:
            return F.linear(self.words(tokens), self.words.weight)

    x = torch.randn(32, 10)
    for model, given, expected in (
        (Tied(), torch.randint(0, 64, (2, 16)), "output head: its weight is tied to an embedding"),
        (nn.Linear(10, 7).double(), x.double(), "f64 is left alone"),
        (nn.Linear(10, 7), x[:0], "no rows"),
        (nn.Linear(10, 7), x, ""),
    ):
        torch._dynamo.reset()  # else sizes that differ are symbols
        assert {why(told) for told in linears_of(model, given, **fields)} == {expected}


# ------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_scales_run_along_the_contracted_dimension_bit_for_bit(sizes: tuple[int, int, int], codegen: str) -> None:
    M, K, N = sizes
    linear = nn.Linear(K, N)
    x, dy = torch.randn(M, K).mul(torch.logspace(-2, 2, K)).requires_grad_(), torch.randn(M, N)
    y = compiled(linear, linears="int8", saved="off", **{"debug.codegen": codegen})(x)
    dx, dw, db = torch.autograd.grad(y, (x, linear.weight, linear.bias), dy)
    expected = product(x, linear.weight, linear.bias), product(dy, linear.weight.t()), product(dy.t(), x.t())
    assert torch.allclose(db, dy.sum(0), atol=1e-4)
    for ours, by_hand in zip((y, dx, dw), expected, strict=True):
        assert torch.allclose(ours, by_hand, rtol=1e-5, atol=1e-5 * float(by_hand.abs().max()))
        assert codegen == "inductor" or torch.equal(ours, by_hand)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_emulated_products_are_those_of_the_codes(dtype: torch.dtype) -> None:
    """But for the order of sums, the rounding of results and, in 16 bit, that of both decoded operands: of each product's
    terms, taken with their magnitudes."""
    torch.manual_seed(0)
    linear, x = nn.Linear(144, 80, dtype=dtype), torch.randn(300, 144, dtype=dtype, requires_grad=True)
    found = []
    for emulate in (False, True):
        torch._dynamo.reset()
        y = compiled(linear, linears="int8", saved="off", **{"linears.emulate": emulate, "fp32.observe": False})(x)
        found.append([y, *torch.autograd.grad(y, (x, linear.weight), torch.ones_like(y))])
    ones, values, weight = torch.ones(300, 80), x.detach().float().abs(), linear.weight.detach().float().abs()
    terms = values @ weight.t() + linear.bias.detach().float().abs(), ones @ weight, ones.t() @ values
    for real, emulated, sums, length in zip(*found, terms, (144, 80, 300), strict=True):
        off = 3 * torch.finfo(dtype).eps + length * 2.0**-24
        assert ((real - emulated).float().abs() <= off * sums).all()
        assert (real.float().abs() > off * sums).any(), "zeros would be seen"


def test_a_weight_on_the_left() -> None:
    model, x, dy = OnTheLeft(), torch.randn(144, 160, requires_grad=True), torch.randn(80, 160)
    y = compiled(model, linears="int8", saved="off")(x)
    dx, dw = torch.autograd.grad(y, (x, model.weight), dy)
    assert torch.equal(y, product(model.weight, x.t()))
    assert torch.equal(dx, product(model.weight.t(), dy.t())) and torch.equal(dw, product(dy, x))


def bar(*operands: Tensor) -> float:
    """The least dB of a product of operands ``[n, contracted]``, of values whose rounding errors are independent.

    Each is half a step of its row at most. Both errors add up in squares, and average out over a sum as products do.
    """
    return -10 * math.log10(sum(float((ROWS.encode(x)[1] / 2).square().mean() / x.square().mean()) for x in operands))


def test_gradients_of_a_linear_are_within_the_derived_bar() -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(144, 80), torch.randn(300, 144, requires_grad=True)
    found = gradient_sqnr(linear, compiled(linear, linears="int8", saved="off"), (x,))
    assert found.pop("bias") > 120, "the bias sees no codes"
    with torch.no_grad():
        dy = torch.randn(300, 80, generator=torch.Generator().manual_seed(3), dtype=torch.float64).float()
        bars = {"weight": bar(dy.t(), x.t()), "arg0": bar(dy, linear.weight.t())}
    assert set(found) == set(bars) and all(found[name] > bars[name] > 25 for name in bars)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite_stays_in_its_row(bad: float) -> None:
    linear, x = nn.Linear(64, 48), torch.randn(32, 64)
    x[3, 5] = bad
    y = compiled(linear, linears="int8", saved="off", **{"fp32.observe": False})(x)
    (dw,) = torch.autograd.grad(y, linear.weight, torch.ones(32, 48))
    assert y[3].isnan().all() and y.isnan().sum() == 48
    assert dw[:, 5].isnan().all() and dw.isnan().sum() == 48, "the column of x along which the wgrad contracts"


def test_more_rows_than_an_int32_sum_holds() -> None:
    linear, x = nn.Linear(1, 2, bias=False), torch.ones(MOST_PRODUCTS + 1, 1)
    y = compiled(linear, linears="int8", saved="off")(x)
    (dw,) = torch.autograd.grad(y, linear.weight, torch.ones_like(y))
    # 127 times by a scale of 1 / 127, rounded; sums of two parts, rounded.
    assert torch.allclose(dw, torch.full((2, 1), MOST_PRODUCTS + 1.0), rtol=6 * 2.0**-24, atol=0)


def test_what_only_matmuls_need_is_kept_as_the_wgrads_codes() -> None:
    fn = compiled(nn.Linear(64, 64, bias=False), linears="int8", **{"saved.min_numel": 0})
    fn(torch.randn(128, 64, requires_grad=True) * 2)
    report = fp8compile.report(fn)
    (saved,) = report.saved
    assert saved.codec == "int8 rowwise, a matmul's operand" and saved.is_operand and saved.bytes_after == 128 * 64
