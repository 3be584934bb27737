"""quantize_linears with scales of blocks ("blockwise", "mxfp8") and with formats by direction: graphs, declines, numbers."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.fx import Graph

import fp8compile
from fp8compile.fx.graph import ENCODING, SPLICED, copy_graph
from fp8compile.numerics import E4M3, E5M2, Blocks, Codec, Format, Tensorwise
from fp8compile.numerics.scaling import E8M0
from fp8compile.passes.quantize_linears import quantize_linears
from fp8compile.recipe.context import Context
from fp8compile.recipe.recipe import Recipe
from fp8compile.reporting.entries import Linear, Skip
from tests.support.graphs import joint_of, text_of
from tests.support.measure import compiled, gradient_sqnr, llama_case, matmul_entries, why

MODES = ("blockwise", "mxfp8")
SIZES = [
    (256, 128, 384),
    (300, 144, 80),
    (40, 48, 16),
]  # M, K, N: whole blocks; multiples of 16 and any M; less than one
LLAMA = (2, 64, 64, 64, 4)  # batch, tokens, hidden, inner and heads of a layer whose linears are all of one shape
by_mode = pytest.mark.parametrize("mode", MODES)


def linears_of(model: nn.Module, *args: Tensor, **fields: object) -> list[Linear | Skip]:
    recipe = Recipe(**{"linears.emulate": True, **fields})  # type: ignore[arg-type]
    return matmul_entries(fp8compile.explain(model, args, recipe=recipe))


@functools.cache
def llama(mode: str) -> Graph:
    """The joint graph of a layer, which no test changes."""
    layer, args = llama_case(*LLAMA)
    return joint_of(layer, *args, linears=mode, **{"linears.emulate": True})


def encodings(graph: Graph) -> list[str]:
    """What is encoded by what codec, one entry for each encoding."""
    codes = [n for n in graph.nodes if ENCODING in n.meta and n.meta["val"].element_size() == 1]
    return [f"{n.meta[SPLICED]} {n.meta[ENCODING].codec}" for n in codes if n.meta["val"].dtype != torch.uint8]


def fake(codec: Codec, x: Tensor) -> Tensor:
    return codec.decode(*codec.encode(x.detach()), x.dtype)


def test_golden_joint_graph_of_a_linear_in_blocks() -> None:
    assert_expected_inline(
        text_of(
            joint_of(
                nn.Linear(64, 16, bias=False), torch.randn(160, 64), linears="blockwise", **{"linears.emulate": True}
            )
        ),
        """\
primals_1: float32[16, 64]
primals_2: float32[160, 64]
tangents_1: float32[160, 16]
where_3: float32[2, 64] = encode(primals_2)
convert_element_type_6: float8_e4m3fn[160, 64] = encode(primals_2)
clamp_max_7: float32[160, 64] = decode(convert_element_type_6, where_3)
where_2: float32[2, 16] = encode(tangents_1)
convert_element_type_4: float8_e5m2[160, 16] = encode(tangents_1)
clamp_max_5: float32[160, 16] = decode(convert_element_type_4, where_2)
where_1: float32[1, 1] = encode(primals_1)
convert_element_type_2: float8_e4m3fn[16, 64] = encode(primals_1)
clamp_max_3: float32[16, 64] = decode(convert_element_type_2, where_1)
where: float32[160, 1] = encode(primals_2)
convert_element_type: float8_e4m3fn[160, 64] = encode(primals_2)
clamp_max_1: float32[160, 64] = decode(convert_element_type, where)
permute_4: float32[64, 16] = permute(clamp_max_3)
mm: float32[160, 16] = mm(clamp_max_1, permute_4)
permute_5: float32[16, 160] = permute(clamp_max_5)
mm_1: float32[16, 64] = mm(permute_5, clamp_max_7)
return mm, mm_1, None
""",
    )


@pytest.mark.parametrize(("mode", "count"), [("blockwise", 4 * 2 + 7 + 7 * 2), ("mxfp8", 4 * 2 + 7 * 2 + 7 * 2)])
def test_an_encoding_serves_all_who_contract_a_value_alike(mode: str, count: int) -> None:
    """4 activations (q, k and v read one, gate and up another) and 7 gradients twice; 7 weights once if blocks are square."""
    found = encodings(llama(mode))
    assert len(found) == len(set(found)) == count


@by_mode
def test_every_matmul_of_every_linear_is_rewritten_and_names_its_mode(mode: str) -> None:
    layer, args = llama_case(*LLAMA)
    found = linears_of(layer, *args, linears=mode)
    assert len(found) == 21 and not any(why(x) for x in found)
    formats = {x.direction: x.formats for x in found if isinstance(x, Linear)}
    assert formats["forward"] == f"e4m3 x e4m3 {mode}, emulated"
    assert formats["dgrad"] == formats["wgrad"] == f"e5m2 x e4m3 {mode}, emulated"
    (all_e4m3,) = {
        x.formats
        for x in linears_of(layer, *args, linears=mode, **{"linears.formats": "e4m3"})
        if isinstance(x, Linear)
    }
    assert all_e4m3 == f"e4m3 x e4m3 {mode}, emulated"


@by_mode
def test_it_is_idempotent(mode: str) -> None:
    shared = llama(mode)
    assert shared.owning_module is not None
    graph = copy_graph(shared.owning_module).graph
    before = len(graph.nodes)
    layer, args = llama_case(*LLAMA)
    statics = frozenset(range(len(list(layer.parameters())) + len(args)))
    context = Context(Recipe(linears={"emulate": True, "mode": mode}), statics)
    assert not quantize_linears(graph, context).linears
    graph.eliminate_dead_code()
    assert len(graph.nodes) == before


# ------------------------------------------------------------------------------------------------------ declines


@by_mode
def test_a_device_with_fp8_units_is_told_that_blocks_are_emulated_only(mode: str) -> None:
    units = mock.patch.object(sys.modules["fp8compile.linears.reasons"], "fp8_unsupported_reason", lambda _: None)
    with units:
        (reason,) = {
            why(x)
            for x in linears_of(nn.Linear(64, 64), torch.randn(32, 64), linears=mode, **{"linears.emulate": False})
        }
    assert reason == f"{mode} scales are emulated only (linears.emulate=True decodes and multiplies, on any device)"


@by_mode
def test_rows_that_vary_are_left(mode: str) -> None:
    model = nn.Linear(64, 32)
    fn = torch.compile(
        model,
        backend="fp8compile",
        options={"debug.codegen": "eager", "linears.emulate": True, "linears": mode},
        dynamic=True,
    )
    x = torch.randn(40, 64)
    assert torch.equal(fn(x), model(x))
    (reason,) = {why(x) for x in matmul_entries(fp8compile.report(fn))}
    assert reason == f"rows that vary from call to call: {mode} scales run along them in the wgrad"


@by_mode
def test_other_reasons_stand_before_those_of_blocks(mode: str) -> None:
    x = torch.randn(32, 64)
    for model, given, expected in (
        (nn.Linear(64, 24), x, "N=24 is not a multiple of 16"),
        (nn.Linear(8, 64), x[:, :8], "K=8 is not a multiple of 16"),
        (nn.Linear(64, 64), x[:0], "no rows"),
        (nn.Linear(64, 64).double(), x.double(), "f64 is left alone"),
    ):
        assert {why(x) for x in linears_of(model, given, linears=mode)} == {expected}


# ------------------------------------------------------------------------------------------------------- numbers


def operands_by_hand(mode: str, gradient: Format) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]:
    """Activation and weight of the forward, gradient and weight of dgrad, gradient and activation of wgrad."""
    along = {
        "blockwise": (lambda fmt: Blocks(fmt, 1, 128), lambda fmt: Blocks(fmt, 128, 1)),
        "mxfp8": (lambda fmt: Blocks(fmt, 1, 32, E8M0), lambda fmt: Blocks(fmt, 32, 1, E8M0)),
    }
    rows, columns = along[mode]
    square = Blocks(E4M3, 128, 128)

    def by_hand(x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        w_forward, w_dgrad = (square, square) if mode == "blockwise" else (rows(E4M3), columns(E4M3))
        return (
            *(fake(rows(E4M3), x), fake(w_forward, w)),
            *(fake(rows(gradient), dy), fake(w_dgrad, w)),
            *(fake(columns(gradient), dy), fake(columns(E4M3), x)),
        )

    return by_hand


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@by_mode
def test_blocks_run_along_the_contracted_dimension_bit_for_bit(
    mode: str, sizes: tuple[int, int, int], codegen: str
) -> None:
    M, K, N = sizes
    linear = nn.Linear(K, N)
    x, dy = torch.randn(M, K).mul(torch.logspace(-2, 2, K)).requires_grad_(), torch.randn(M, N)
    y = compiled(linear, linears=mode, saved="off", **{"linears.emulate": True, "debug.codegen": codegen})(x)
    dx, dw, _ = torch.autograd.grad(y, (x, linear.weight, linear.bias), dy)
    x_f, w_f, dy_d, w_d, dy_w, x_w = operands_by_hand(mode, E5M2)(x, linear.weight, dy)
    expected = F.linear(x_f, w_f, linear.bias.detach()), dy_d @ w_d, dy_w.t() @ x_w
    for ours, by_hand in zip((y, dx, dw), expected, strict=True):
        assert torch.allclose(ours, by_hand, rtol=1e-5, atol=1e-5 * float(by_hand.abs().max()))
        assert codegen == "inductor" or torch.equal(ours, by_hand)


@by_mode
def test_a_weight_on_the_left_has_the_blocks_of_a_weight(mode: str) -> None:
    class Left(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(80, 144) * torch.logspace(-2, 2, 144))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight @ x

    model, x, dy = Left(), torch.randn(144, 160, requires_grad=True), torch.randn(80, 160)
    y = compiled(model, linears=mode, saved="off", **{"linears.emulate": True})(x)
    dx, dw = torch.autograd.grad(y, (x, model.weight), dy)
    x_f, w_f, dy_d, w_d, dy_w, x_w = operands_by_hand(mode, E5M2)(x.t(), model.weight, dy.t())
    assert torch.equal(y, w_f @ x_f.t())
    assert torch.equal(dx, w_d.t() @ dy_d.t()) and torch.equal(dw, dy_w.t() @ x_w)


def bar(*formats: Format) -> float:
    """The least dB of a product of operands in these formats, of values whose rounding errors are independent.

    A value v rounds by at most half_ulp * |v|, evenly spread: its error has an RMS of half_ulp / sqrt(3) of v at most.
    The errors of both operands add up in a product in squares, and average out over a sum as the product itself does.
    """
    return -10 * math.log10(sum(fmt.half_ulp**2 / 3 for fmt in formats))


@pytest.mark.parametrize("formats", ["e4m3", "hybrid"])
@by_mode
def test_gradients_of_a_linear_are_within_the_derived_bar(mode: str, formats: str) -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(144, 80), torch.randn(300, 144, requires_grad=True)
    fn = compiled(linear, linears=mode, saved="off", **{"linears.emulate": True, "linears.formats": formats})
    found = gradient_sqnr(linear, fn, (x,))
    assert found.pop("bias") > 120, "the bias sees no codes"
    assert set(found) == {"weight", "arg0"}
    assert min(found.values()) > bar(E4M3 if formats == "e4m3" else E5M2, E4M3)


@by_mode
def test_an_outlier_costs_blocks_less_than_a_tensor(mode: str) -> None:
    """One activation of 2**20: under its scale half of E4M3's smallest subnormal is 2.3, and what is less is lost."""
    torch.manual_seed(0)
    linear, x = nn.Linear(256, 64, bias=False), torch.randn(256, 256)
    x[0, 0] = 2.0**20

    def of_clean_columns(mode: str) -> float:
        torch._dynamo.reset()
        fn = compiled(linear, linears=mode, saved="off", **{"linears.emulate": True, "linears.formats": "e4m3"})
        dy = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
        (dw,) = torch.autograd.grad(fn(x), linear.weight, dy)
        exact = dy.double().t() @ x.double()
        return 10 * math.log10(exact[:, 1:].square().sum() / (exact - dw)[:, 1:].square().sum())

    assert of_clean_columns("tensorwise") < 10 < bar(E4M3, E4M3) < of_clean_columns(mode)


@by_mode
def test_what_only_matmuls_need_is_kept_as_codes_of_the_wgrads_blocks(mode: str) -> None:
    fn = compiled(nn.Linear(64, 64, bias=False), linears=mode, **{"linears.emulate": True, "saved.min_numel": 0})
    fn(torch.randn(128, 64, requires_grad=True) * 2)
    report = fp8compile.report(fn)
    (saved,) = report.saved
    assert saved.codec.startswith("e4m3 blocks of 128x1" if mode == "blockwise" else "e4m3 blocks of 32x1, E8M0")
    assert saved.bytes_after == 128 * 64, "the codes; scales have no entry of their own"
    scales = 64 * 4 + (4 if mode == "blockwise" else 0)  # 64 of FP32, or 4 x 64 of one byte; and the weight's one
    assert report.saved_bytes == 128 * 64 + scales


# -------------------------------------------------------------------------------------------- formats by direction


@pytest.mark.parametrize(("dgrad", "wgrad"), [(E4M3, E5M2), (E5M2, E4M3)], ids=lambda fmt: fmt.name)
def test_a_gradient_has_the_format_of_the_matmul_that_reads_it(dgrad: Format, wgrad: Format) -> None:
    linear, formats = nn.Linear(64, 32), {"dgrad": dgrad.name, "wgrad": wgrad.name}
    x, dy = torch.randn(48, 64, requires_grad=True), torch.randn(48, 32)
    fn = compiled(linear, linears="tensorwise", saved="off", **{"linears.emulate": True, "linears.formats": formats})
    dx, dw = torch.autograd.grad(fn(x), (x, linear.weight), dy)
    w, x_hat = fake(Tensorwise(E4M3), linear.weight), fake(Tensorwise(E4M3), x)
    assert torch.equal(dx, fake(Tensorwise(dgrad), dy) @ w)
    assert torch.equal(dw, fake(Tensorwise(wgrad), dy).t() @ x_hat)
    told = {x.direction: x.formats for x in fp8compile.report(fn).linears}
    assert told == {
        "forward": "e4m3 x e4m3 tensorwise, emulated",
        "dgrad": f"{dgrad.name} x e4m3 tensorwise, emulated",
        "wgrad": f"{wgrad.name} x e4m3 tensorwise, emulated",
    }


@pytest.mark.parametrize("linear", ["tensorwise", "rowwise", *MODES])
def test_formats_by_direction_hold_in_every_mode(linear: str) -> None:
    x = torch.randn(64, 64, requires_grad=True)
    formats = {"dgrad": "e4m3", "wgrad": "e5m2"}
    told = linears_of(nn.Linear(64, 64), x, linears=linear, **{"linears.formats": formats})
    found = {x.direction: x.formats for x in told if isinstance(x, Linear)}
    assert {name: text.split(" x")[0] for name, text in found.items()} == {"forward": "e4m3", **formats}
    assert all(linear in text for text in found.values())
