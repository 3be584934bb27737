"""quantize_linears in INT8 ("int8", "int8_blocks", ``hadamard_wgrad``): graphs, declines, numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator
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
from fp8compile.compiler.inductor import NOTHING_TO_TURN
from fp8compile.encoding.device import int8_unsupported_reason
from fp8compile.encoding.integer_matmuls import reason_against_integers
from fp8compile.fx.graph import ENCODING, SPLICED
from fp8compile.numerics import INT8, Blocks, Codec, Rowwise
from fp8compile.numerics.hadamard import turned
from fp8compile.numerics.integer_products import MOST_PRODUCTS, int8_product
from fp8compile.passes.quantize_linears import quantize_linears
from fp8compile.recipe.context import Context
from fp8compile.recipe.recipe import Recipe
from fp8compile.reporting.entries import Linear, Skip
from tests.support.graphs import joint_of, text_of
from tests.support.measure import compiled, gradient_sqnr, llama_case, matmuls_told, why

aten = torch.ops.aten
ROWS, SQUARE = Rowwise(INT8), Blocks(INT8, 32, 32)
SIZES = [(256, 128, 384), (300, 144, 80), (37, 10, 7)]  # M, K, N: even ones, any M, nothing even


@pytest.fixture(autouse=True)
def vnni() -> Iterator[None]:
    """Every CPU multiplies INT8: ``_int_mm`` runs on all, if slowly."""
    with mock.patch.object(private, "cpu_has_vnni", lambda: True):
        yield


def linears_of(model: nn.Module, *args: Tensor, **fields: object) -> list[Linear | Skip]:
    recipe = Recipe(**{"linear": "int8", **fields})  # type: ignore[arg-type]
    return matmuls_told(fp8compile.explain(model, args, recipe=recipe))


def encodings(graph: Graph) -> list[str]:
    """What is encoded by what codec, one entry for each encoding."""
    codes = [n for n in graph.nodes if ENCODING in n.meta and n.meta["val"].dtype == torch.int8]
    return [f"{n.meta[SPLICED]} {n.meta[ENCODING].codec}" for n in codes]


def product(x: Tensor, w: Tensor, added: Tensor | None = None) -> Tensor:
    """``x [M, K]`` by ``w [N, K]`` transposed, both encoded by rows."""
    (a, inv_a), (b, inv_b) = ROWS.encode(x.detach()), ROWS.encode(w.detach())
    return int8_product(a, b.t(), inv_a, inv_b.t(), x.dtype, added)


def fake(codec: Codec, x: Tensor) -> Tensor:
    return codec.decode(*codec.encode(x.detach()), x.dtype)


class OnTheLeft(nn.Module):
    """A linear whose weight is multiplied from the left."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(80, 144) * torch.logspace(-2, 2, 144))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight @ x


# ------------------------------------------------------------------------------------------------------- graphs


def test_golden_joint_graph_of_a_linear_in_int8() -> None:
    assert_expected_inline(
        text_of(joint_of(nn.Linear(64, 24, bias=False), torch.randn(160, 64), linear="int8")),
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
    layer, args = llama_case(2, 64, 64, 128, 4)
    graph = joint_of(layer, *args, linear="int8")
    targets = [node.target for node in graph.nodes]
    assert targets.count(aten._int_mm.default) == 21 and not {aten.mm.default, aten.addmm.default} & {*targets}
    assert len(encodings(graph)) == (4 + 7 + 7) * 2


def test_square_blocks_serve_both_matmuls_of_a_value() -> None:
    layer, args = llama_case(2, 64, 64, 128, 4)
    assert len(encodings(joint_of(layer, *args, linear="int8_blocks", emulate=True))) == 4 + 7 + 7


@pytest.mark.parametrize(
    ("fields", "formats"),
    [
        ({}, "int8 x int8 rowwise"),
        ({"emulate": True}, "int8 x int8 rowwise, emulated"),
        ({"linear": "int8_blocks", "emulate": True}, "int8 x int8 int8_blocks, emulated"),
    ],
    ids=str,
)
def test_every_matmul_is_rewritten_and_named(fields: dict[str, Any], formats: str) -> None:
    layer, args = llama_case(2, 64, 64, 128, 4)
    found = linears_of(layer, *args, **fields)
    assert len(found) == 21 and {x.formats for x in found if isinstance(x, Linear)} == {formats}


def test_the_report_says_int8() -> None:
    report = fp8compile.explain(nn.Linear(64, 64), (torch.randn(32, 64),), recipe={"linear": "int8"})
    assert "linears: 2 of 2 matmuls in INT8" in str(report)


@pytest.mark.parametrize(
    "fields", [{}, {"hadamard_wgrad": True}, {"linear": "int8_blocks", "emulate": True}], ids=str
)
def test_it_is_idempotent(fields: dict[str, Any]) -> None:
    layer, args = llama_case(2, 64, 64, 128, 4)
    fields = {"linear": "int8", **fields}
    graph = joint_of(layer, *args, **fields)
    before = len(graph.nodes)
    context = Context(Recipe(**fields), frozenset(range(len(list(layer.parameters())) + 3)))
    assert not quantize_linears(graph, context).linears
    graph.eliminate_dead_code()
    assert len(graph.nodes) == before


# ------------------------------------------------------------------------------------------------------ declines


def test_a_cpu_without_vnni_is_left_and_told() -> None:
    model, x = nn.Linear(64, 64), torch.randn(32, 64)
    with mock.patch.object(private, "cpu_has_vnni", lambda: False):
        (reason,) = {why(told) for told in linears_of(model, x)}
        assert {why(told) for told in linears_of(model, x, emulate=True)} == {""}
    assert reason == "this CPU has no AVX512 VNNI for INT8 products (emulate=True decodes and multiplies)"


def test_devices_without_int8_products_are_told() -> None:
    cuda = torch.device("cuda")
    for capability, reason in (((7, 5), "compute capability 7.5 is not supported by linear='int8'"), ((8, 0), None)):
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

    recipe = Recipe(linear="int8")
    assert reason_against_integers(operands("cuda"), recipe) == reason
    assert reason_against_integers(operands("cpu"), recipe) is None
    assert reason_against_integers(operands("cuda"), Recipe(linear="int8", emulate=True)) is None


def test_a_wgrad_over_rows_that_vary_is_left() -> None:
    model = nn.Linear(64, 32)
    fn = torch.compile(model, backend="fp8compile", options={"codegen": "eager", "linear": "int8"}, dynamic=True)
    x = torch.randn(40, 64, requires_grad=True)
    y = fn(x)
    dx, dw = torch.autograd.grad(y, (x, model.weight), dy := torch.randn(40, 32))
    assert torch.equal(y, product(x, model.weight, model.bias)) and torch.equal(dw, dy.t() @ x)
    assert torch.equal(dx, product(dy, model.weight.t()))
    reasons = {told.direction: why(told) for told in matmuls_told(fp8compile.report(fn))}
    assert reasons == {
        **{"forward": "", "dgrad": ""},
        "wgrad": "rows that vary from call to call: an INT32 sum of the wgrad holds 133,144 of them",
    }
    assert fn(torch.randn(0, 64)).shape == (0, 32)


def test_blocks_are_emulated_only() -> None:
    (reason,) = {why(x) for x in linears_of(nn.Linear(64, 64), torch.randn(32, 64), linear="int8_blocks")}
    assert reason == "int8_blocks scales are emulated only (emulate=True decodes and multiplies, on any device)"


@pytest.mark.parametrize("fields", [{}, {"linear": "int8_blocks", "emulate": True}], ids=str)
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
    y = compiled(linear, preset="linear_only", linear="int8", codegen=codegen)(x)
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
        y = compiled(linear, preset="linear_only", linear="int8", emulate=emulate, observe=False)(x)
        found.append([y, *torch.autograd.grad(y, (x, linear.weight), torch.ones_like(y))])
    ones, values, weight = torch.ones(300, 80), x.detach().float().abs(), linear.weight.detach().float().abs()
    terms = values @ weight.t() + linear.bias.detach().float().abs(), ones @ weight, ones.t() @ values
    for real, emulated, sums, length in zip(*found, terms, (144, 80, 300), strict=True):
        off = 3 * torch.finfo(dtype).eps + length * 2.0**-24
        assert ((real - emulated).float().abs() <= off * sums).all()
        assert (real.float().abs() > off * sums).any(), "zeros would be seen"


def test_a_weight_on_the_left() -> None:
    model, x, dy = OnTheLeft(), torch.randn(144, 160, requires_grad=True), torch.randn(80, 160)
    y = compiled(model, preset="linear_only", linear="int8")(x)
    dx, dw = torch.autograd.grad(y, (x, model.weight), dy)
    assert torch.equal(y, product(model.weight, x.t()))
    assert torch.equal(dx, product(model.weight.t(), dy.t())) and torch.equal(dw, product(dy, x))


def bar(*operands: Tensor) -> float:
    """The least dB of a product of operands ``[n, contracted]``, of values whose rounding errors are independent.

    Each is half a step of its row at most. Both errors add up in squares, and average out over a sum as products do.
    """
    return -10 * math.log10(sum(float((ROWS.encode(x)[1] / 2).square().mean() / x.square().mean()) for x in operands))


@pytest.mark.parametrize("turns", [False, True])
def test_gradients_of_a_linear_are_within_the_derived_bar(turns: bool) -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(144, 80), torch.randn(300, 144, requires_grad=True)
    found = gradient_sqnr(linear, compiled(linear, preset="linear_only", linear="int8", hadamard_wgrad=turns), (x,))
    assert found.pop("bias") > 120, "the bias sees no codes"
    with torch.no_grad():
        dy = torch.randn(300, 80, generator=torch.Generator().manual_seed(3), dtype=torch.float64).float()
        bars = {"weight": bar(dy.t(), x.t()), "arg0": bar(dy, linear.weight.t())}
    assert set(found) == set(bars) and all(found[name] > bars[name] > 25 for name in bars)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite_stays_in_its_row(bad: float) -> None:
    linear, x = nn.Linear(64, 48), torch.randn(32, 64)
    x[3, 5] = bad
    y = compiled(linear, preset="linear_only", linear="int8", observe=False)(x)
    (dw,) = torch.autograd.grad(y, linear.weight, torch.ones(32, 48))
    assert y[3].isnan().all() and y.isnan().sum() == 48
    assert dw[:, 5].isnan().all() and dw.isnan().sum() == 48, "the column of x along which the wgrad contracts"


def test_more_rows_than_an_int32_sum_holds() -> None:
    linear, x = nn.Linear(1, 2, bias=False), torch.ones(MOST_PRODUCTS + 1, 1)
    y = compiled(linear, preset="linear_only", linear="int8")(x)
    (dw,) = torch.autograd.grad(y, linear.weight, torch.ones_like(y))
    # 127 times by a scale of 1 / 127, rounded; sums of two parts, rounded.
    assert torch.allclose(dw, torch.full((2, 1), MOST_PRODUCTS + 1.0), rtol=6 * 2.0**-24, atol=0)


def test_what_only_matmuls_need_is_kept_as_the_wgrads_codes() -> None:
    fn = compiled(nn.Linear(64, 64, bias=False), linear="int8", min_saved_numel=0)
    fn(torch.randn(128, 64, requires_grad=True) * 2)
    report = fp8compile.report(fn)
    (saved,) = report.saved
    assert saved.codec == "int8 rowwise, a matmul's operand" and saved.is_operand and saved.bytes_after == 128 * 64


# -------------------------------------------------------------------------------------------------------- turned


@pytest.mark.parametrize("model", ["right", "left"])
def test_operands_of_the_wgrad_alone_are_turned(model: str) -> None:
    linear, x, dy = nn.Linear(144, 80, bias=False), torch.randn(300, 144, requires_grad=True), torch.randn(300, 80)
    run, given, dy = (linear, x, dy) if model == "right" else (OnTheLeft(), x.detach().t().requires_grad_(), dy.t())
    y = compiled(run, preset="linear_only", linear="int8", hadamard_wgrad=True)(given)
    dx, dw = torch.autograd.grad(y, (given, run.weight), dy)
    x, w = x.detach(), run.weight
    if model == "left":
        dx, dy, y = dx.t(), dy.t(), y.t()
    assert torch.allclose(y, product(x, w)) and torch.allclose(dx, product(dy, w.t()))
    by_hand = product(turned(dy, 0).t(), turned(x, 0).t())
    assert torch.allclose(dw, by_hand, atol=1e-5 * float(by_hand.abs().max()))
    assert not torch.allclose(dw, product(dy.t(), x.t()), atol=1e-5 * float(by_hand.abs().max()))


def test_what_is_turned_is_shared_and_told() -> None:
    layer, args = llama_case(2, 64, 64, 128, 4)
    graph = joint_of(layer, *args, linear="int8", hadamard_wgrad=True)
    assert [node.target for node in graph.nodes].count(aten.bmm.default) == 4 + 7, "activations and gradients"
    told = linears_of(layer, *args, hadamard_wgrad=True)
    formats = {x.direction: x.formats for x in told if isinstance(x, Linear)}
    assert formats == {
        **dict.fromkeys(("forward", "dgrad"), "int8 x int8 rowwise"),
        "wgrad": "int8 x int8 rowwise, turned",
    }


def test_rows_that_vary_are_not_turned() -> None:
    options = {"codegen": "eager", "linear": "int8", "hadamard_wgrad": True, "emulate": True}
    fn = torch.compile(nn.Linear(64, 32), backend="fp8compile", options=options, dynamic=True)
    fn(torch.randn(40, 64))
    formats = {x.formats for x in fp8compile.report(fn).linears if x.direction == "wgrad"}
    assert formats == {"int8 x int8 rowwise, emulated, not turned: rows that vary from call to call"}


def test_turned_outliers_cost_a_wgrad_less() -> None:
    """Tokens a hundred times as large as others: without a turn they set the step of all channels of the wgrad."""
    torch.manual_seed(0)
    linear, x = nn.Linear(128, 64, bias=False), torch.randn(512, 128)
    x[::64] *= 100
    dy = torch.randn(512, 64)
    exact = dy.double().t() @ x.double()

    def off(turns: bool) -> float:
        torch._dynamo.reset()
        fn = compiled(linear, preset="linear_only", linear="int8", hadamard_wgrad=turns)
        (dw,) = torch.autograd.grad(fn(x), linear.weight, dy)
        return float((dw - exact).norm() / exact.norm())

    # An operand's step falls with its largest value: a quarter of it for x, whose error is 3/4 of the sum in squares or less.
    assert off(True) < off(False)


def saved_with(model: nn.Module, x: Tensor, **options: object) -> int:
    torch._dynamo.reset()
    recipe = Recipe(**{"linear": "int8", **options})  # type: ignore[arg-type]
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
    real, emulated = (saved_with(Shared(), x, emulate=each, hadamard_wgrad=turns) for each in (False, True))
    assert real == emulated < saved_with(Shared(), x, linear="off", saved="off")


def test_what_is_turned_is_no_operand_of_attention() -> None:
    x = torch.randn(256, 64)
    found = {saved_with(Shared(), x, hadamard_wgrad=True, saved_attention=each) for each in (True, False, "auto")}
    assert len(found) == 1


def test_fp16_operands_are_not_turned() -> None:
    """16 values of 20,000 are 80,000 turned, which FP16 does not hold."""
    model, x = nn.Linear(64, 64).half(), torch.randn(256, 64).half()
    x[:, 3] = 20_000
    formats = {t.formats for t in linears_of(model, x, hadamard_wgrad=True, observe=False) if isinstance(t, Linear)}
    assert any("not turned" in told and "FP16" in told for told in formats)
    y = compiled(model, preset="linear_only", linear="int8", hadamard_wgrad=True, observe=False)(x)
    [dw] = torch.autograd.grad(y, model.weight, torch.full_like(y, 1e-3))
    assert dw.isfinite().all()


def test_turning_without_int8_is_remarked_on() -> None:
    for linear, remarked in (("tensorwise", True), ("int8", False), ("int8_blocks", False)):
        torch._dynamo.reset()
        recipe = Recipe(linear=linear, hadamard_wgrad=True, emulate=True)
        report = fp8compile.explain(nn.Linear(64, 64), (torch.randn(64, 64),), recipe=recipe)
        assert (NOTHING_TO_TURN in report.remarks) == remarked
