"""encode_saved in few bits: golden, contract, numbers against float64, and where it declines."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import fp8compile
from fp8compile.analysis.sensitivity import Sensitivity
from fp8compile.numerics.few_bits import FewBits
from fp8compile.numerics.groups import Groups
from fp8compile.passes import encode_saved
from fp8compile.recipe.context import Context
from fp8compile.recipe.recipe import Recipe
from fp8compile.saved.bits_by_use import UNKNOWN_LENGTH, few_bits_of
from fp8compile.saved.plan import plan_saved
from tests.support.graphs import forward_of, split_of
from tests.support.measure import compiled, gradient_sqnr, kept_bytes, llama_case
from tests.support.net import Net, SwiGLU
from tests.support.reference import sqnr_db
from tests.support.running_error import outcome

BY_SILU = "a function, silu, of it in the backward"
FORMATS = ("2bit", "3bit", "4bit", "5bit", "6bit")


def names(model: nn.Module, *args: Tensor, **options: object) -> dict[str, str]:
    """The codec of each module's value, as the report has it."""
    torch._dynamo.reset()
    fn = compiled(model, **{"saved.min_numel": 0, "linears": "off", **options})
    fn(*args).float().sum().backward()
    return {s.origin.module: s.codec for s in fp8compile.report(fn).saved}


# -------------------------------------------------------------------------------------------- golden and contract


def test_golden_forward_of_two_linears() -> None:
    split = split_of(SwiGLU(), torch.randn(128, 64), saved="3bit", linears="off")
    text = "".join(f"{line}\n" for line in forward_of(split).splitlines() if "encode" in line)
    assert_expected_inline(
        text,
        """\
view_13: uint8[8192] = encode(addmm)
convert_element_type_7: bfloat16[128, 1] = encode(addmm)
convert_element_type_8: bfloat16[128, 1] = encode(addmm)
view_23: uint8[6144] = encode(addmm_1)
convert_element_type_24: bfloat16[128, 1] = encode(addmm_1)
convert_element_type_25: bfloat16[128, 1] = encode(addmm_1)
""",
    )


def test_a_linear_use_gets_the_bits_and_a_smooth_one_at_least_four() -> None:
    for name in FORMATS:
        bits = int(name[0])
        why = f" ({BY_SILU})" if bits < 4 else ""
        found = names(SwiGLU(), torch.randn(128, 64), saved=name)
        assert found == {"up": f"{bits}bit 1x128", "gate": f"{max(bits, 4)}bit 1x128{why}"}


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("bits", [2, 4, 5])
def test_the_report_counts_what_autograd_keeps_and_the_prediction_too(bits: int, group_size: int) -> None:
    model, x, options = SwiGLU(), torch.randn(128, 64), {"saved": f"{bits}bit", "saved.group_size": group_size}
    fn = compiled(model, linears="off", **options, **{"saved.min_numel": 0})
    kept, shape = kept_bytes(model, fn, (x,)), (128, 128)
    assert fp8compile.report(fn).saved_bytes == kept
    assert kept == FewBits(bits, group_size).nbytes(shape) + FewBits(max(bits, 4), group_size).nbytes(shape)
    torch._dynamo.reset()
    split = split_of(model, x, disabled="encode_saved", linears="off", **options)
    assert sum(plan_saved(split, Context(Recipe(**options | {"saved.min_numel": 0}))).nbytes.values()) == kept  # type: ignore[arg-type]


def test_it_is_idempotent() -> None:
    split = split_of(SwiGLU(), torch.randn(128, 64), saved="4bit")
    before = [e.forward for e in split.edges]
    assert not encode_saved.encode_saved(split, Context(Recipe(saved={"min_numel": 0, "format": "4bit"}))).saved
    assert [e.forward for e in split.edges] == before


def test_outputs_stay_and_no_random_number_is_taken() -> None:
    model, x = SwiGLU(), torch.randn(128, 64)
    exact = compiled(model, saved="off", linears="off")(x)
    torch._dynamo.reset()
    state = torch.get_rng_state()
    ours = compiled(model, saved="4bit", linears="off", **{"saved.min_numel": 0})(x)
    ours.sum().backward()
    assert torch.equal(ours, exact) and torch.equal(torch.get_rng_state(), state)


def test_modules_have_bits_of_their_own() -> None:
    found = names(
        SwiGLU(),
        torch.randn(128, 64),
        saved="4bit",
        modules={"up": {"saved": "5bit", "saved.group_size": 32}},
    )
    assert found == {"up": "5bit 1x32", "gate": "4bit 1x128"}


# ------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("codegen", ["eager", pytest.param("inductor", marks=pytest.mark.sweep)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_against_float64(dtype: torch.dtype, codegen: str) -> None:
    """Gaussian groups of 128 have 19.8 dB in four bits, and 6 dB for each bit; what two of them make, 3 dB less."""
    torch.manual_seed(0)
    model, x = SwiGLU().to(dtype), torch.randn(128, 64, dtype=dtype)
    for bits in (4, 6):
        torch._dynamo.reset()
        fn = compiled(model, linears="off", saved=f"{bits}bit", **{"saved.min_numel": 0, "debug.codegen": codegen})
        found = gradient_sqnr(model, fn, (x,))
        assert min(found.values()) > 16.5 + 6 * (bits - 4), found


@pytest.mark.parametrize("bits", [2, 4])
def test_sums_over_tokens_that_are_alike_are_right_on_average(bits: int) -> None:
    """The same row 4096 times: each has draws of its own, so the noise of a weight's gradient is 64 times less."""
    torch.manual_seed(0)
    model = Net(lambda h: h * torch.linspace(0.5, 2, 64))
    x = torch.randn(1, 64).expand(4096, 64).contiguous()
    fn = compiled(model, linears="off", saved=f"{bits}bit", **{"saved.min_numel": 0, "saved.group_size": 64})
    (exact,), (found,) = (torch.autograd.grad(f(x).sum(), [model.b.weight]) for f in (model, fn))
    db = sqnr_db(exact.double(), found)
    one = 20.7 - 6.02 * (4 - bits) - (1 if bits == 2 else 0)  # of one row, as measured of Gaussian groups of 64
    assert one + 20 * math.log10(64) - 3 < db, (
        db,
        "the dB of one row and of a mean of 4096, less 3 for this row's range",
    )


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("function", [F.silu, F.gelu, torch.tanh, lambda h: h**3, lambda h: h + F.gelu(h)])
def test_gradients_lie_within_what_the_errors_allow(function: Callable[[Tensor], Tensor], bits: int) -> None:
    torch.manual_seed(0)
    found = outcome(Net(function), torch.randn(64, 64), saved=f"{bits}bit")
    assert found.encoded and found.sound, found


def test_a_llama_layer_in_four_bits() -> None:
    layer, args = llama_case()
    fn = compiled(layer, linears="off", saved="4bit")
    kept = kept_bytes(layer, fn, args) / (args[0].numel() * 2)
    assert kept <= 4.04 and min(gradient_sqnr(layer, fn, args).values()) > 16
    codecs = [s.codec for s in fp8compile.report(fn).saved]
    assert codecs.count("4bit 1x128") == 4 and sum("int8" in c for c in codecs) == 4, "attention's stay in 8 bits"


def test_attentions_tensors_have_few_bits_where_the_recipe_names_them() -> None:
    layer, args = llama_case(seq=64, hidden=128, ffn=128)
    fn = compiled(layer, saved="2bit", linears="off", **{"saved.min_numel": 0, "saved.attention_format": "3bit"})
    kept_bytes(layer, fn, args)
    codecs = [s.codec.split(" (")[0] for s in fp8compile.report(fn).saved]
    counts = {name: codecs.count(f"{name} 1x128") for name in FORMATS}
    assert counts["2bit"] == 3 and counts["3bit"] == 2 and counts["4bit"] == 1 + 2, "q, k and the gate have 4"


# ------------------------------------------------------------------------------------------------ where it declines


@pytest.mark.parametrize(
    ("function", "codec"),
    [
        (F.relu, "e4m3 1x128 (compared with zero in the backward)"),
        (torch.exp, "e4m3 1x128 (made by exp: spans decades)"),
        (F.hardswish, "int8 1x128 (8 bits: read in the backward by "),
        (lambda h: F.silu(3 * h), f"int8 1x128 (8 bits: {BY_SILU}, too steep for 4)"),
        (lambda h: F.silu(1000 * h), "e4m3 1x128 (a steep function"),
    ],
)
def test_what_is_not_right_on_average_is_stored_by_the_rule_of_auto(
    function: Callable[[Tensor], Tensor], codec: str
) -> None:
    x = torch.randn(128, 64)
    (found,) = names(Net(function), x, saved="4bit").values()
    (auto,) = names(Net(function), x, saved="auto").values()
    assert found.startswith(codec) and found.split(" (")[0] == auto.split(" (")[0]


def test_what_may_not_be_rounded_at_all_stays_exact() -> None:
    assert not names(Net(lambda h: torch.log(h * h * h * h)), torch.randn(128, 64), saved="4bit")


def test_rows_whose_length_only_a_run_knows_have_8_bits() -> None:
    dynamic: Any = StatelessSymbolicContext([DimDynamic.DYNAMIC] * 2)
    symbolic = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.empty(64, 48), symbolic_context=dynamic)
    split = split_of(SwiGLU(), torch.randn(128, 64), disabled="encode_saved", linears="off")
    used = next(e.backward for e in split.edges if e.forward.name == "addmm_1")
    for value, expected in ((symbolic, (None, UNKNOWN_LENGTH)), (torch.empty(128, 128), (FewBits(4), ""))):
        used.meta["val"] = value
        assert few_bits_of(used, 4, Groups(), Sensitivity(split), of_attention=False) == expected


def test_symbolic_numbers_of_rows_are_one_graph() -> None:
    torch._dynamo.reset()
    model = SwiGLU(64, 100)
    fn = compiled(model, saved="4bit", linears="off", **{"saved.min_numel": 0, "saved.group_size": 32})
    x = torch.randn(4, 16, 64)
    torch._dynamo.mark_dynamic(x, 0)
    fn(x).sum().backward()
    with torch.compiler.set_stance("fail_on_recompile"):
        for rows in (3, 4, 9):
            x = torch.randn(rows, 16, 64)
            assert min(gradient_sqnr(model, fn, (x,)).values()) > 14
