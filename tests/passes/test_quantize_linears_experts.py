"""quantize_linears on grouped matmuls: all three in FP8, under every recipe's word, for any way that tokens go."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.fx import Graph

import fp8compile
from fp8compile.fx.graph import SPLICED, copy_graph
from fp8compile.linears.expert_reasons import NOT_OF_ROWS, OPAQUE, OTHER_SCALES, ROUTER, WITH_MORE
from fp8compile.passes.quantize_linears import quantize_linears
from fp8compile.recipe.context import Context
from fp8compile.recipe.recipe import Recipe
from fp8compile.reporting.entries import Linear, Skip
from tests.support.experts import Grouped, ends_at, experts_case, rows_of
from tests.support.graphs import joint_of, text_of
from tests.support.grouped_codes import grouped_units
from tests.support.measure import matmul_entries, why

DIRECTIONS = ["forward", "forward", "dgrad", "wgrad", "wgrad", "dgrad"]
MODES = pytest.mark.parametrize("linear", ["auto", "tensorwise", "rowwise"])


def _told(model: nn.Module, *args: Tensor, **fields: object) -> list[Linear | Skip]:
    """The matmuls of the experts."""
    recipe = Recipe(**{"linears.emulate": True, **fields})  # type: ignore[arg-type]
    return [m for m in matmul_entries(fp8compile.explain(model, args, recipe=recipe)) if m.origin.module != "gate"]


@functools.cache
def emulated() -> Graph:
    """The joint graph of a layer of experts, which no test changes."""
    layer, x = experts_case()
    return joint_of(layer, x, **{"linears.emulate": True})


def test_golden_emulated_matmuls() -> None:
    shown = [
        line
        for line in text_of(
            joint_of(Grouped(), rows_of(64), ends_at(16, 32, 48, 64), **{"linears.emulate": True})
        ).splitlines()
        if "_grouped_mm(" in line or "_part(" in line or "_weight(" in line or "owners(" in line
    ]
    assert_expected_inline(
        "\n".join(shown),
        """\
where_5: float32[4, 32, 1] = encode_weight(primals_2)
as_strided_3: float8_e4m3fn[4, 32, 48] = encode_weight(primals_2)
permute_8: bfloat16[4, 48, 32] = decode_weight(as_strided_3, where_5)
searchsorted: int32[64] = owners(primals_3)
as_strided_2: float32[5, 32] = scale_part(primals_1, searchsorted)
convert_element_type_19: float8_e4m3fn[64, 32] = encode_part(primals_1, searchsorted, as_strided_2)
convert_element_type_21: bfloat16[64, 32] = decode_part(convert_element_type_19, as_strided_2, searchsorted)
as_strided_1: float32[5, 48] = scale_part(tangents_1, searchsorted)
convert_element_type_13: float8_e4m3fn[64, 48] = encode_part(tangents_1, searchsorted, as_strided_1)
convert_element_type_15: bfloat16[64, 48] = decode_part(convert_element_type_13, as_strided_1, searchsorted)
where_1: float32[4, 48, 1] = encode_weight(primals_2)
as_strided: float8_e4m3fn[4, 48, 32] = encode_weight(primals_2)
convert_element_type_9: bfloat16[4, 48, 32] = decode_weight(as_strided, where_1)
_grouped_mm: bfloat16[64, 48] = _grouped_mm(convert_element_type_4, permute_5, primals_3)
_grouped_mm_1: bfloat16[4, 48, 32] = _grouped_mm(permute_6, convert_element_type_21, primals_3)
_grouped_mm_2: bfloat16[64, 32] = _grouped_mm(convert_element_type_26, permute_10, primals_3)""",
    )


def test_golden_matmuls_of_codes() -> None:
    with grouped_units():
        text = text_of(joint_of(Grouped(), rows_of(64), ends_at(16, 32, 48, 64), linears="rowwise"))
    shown = [line for line in text.splitlines() if "scaled_grouped_mm(" in line or "lay_out_part(" in line]
    shown = [line.replace("float8_e4m3fn", "e4m3").replace("_scaled_grouped_mm", "y") for line in shown]
    assert_expected_inline(
        "\n".join(shown),
        """\
as_strided_9: e4m3[32, 128] = lay_out_part(convert_element_type_13, as_strided_2, as_strided_3)
as_strided_6: e4m3[48, 128] = lay_out_part(convert_element_type_9, as_strided_2, as_strided_3)
y: bfloat16[64, 48] = scaled_grouped_mm(convert_element_type_2, permute_5, where, squeeze, primals_3)
y_1: bfloat16[4, 48, 32] = scaled_grouped_mm(as_strided_6, as_strided_9, as_strided_1, as_strided_7, as_strided_4)
y_2: bfloat16[64, 32] = scaled_grouped_mm(convert_element_type_16, permute_10, where_6, squeeze_1, primals_3)""",
    )


@MODES
def test_all_matmuls_of_experts_have_scales_ofrows_of(linear: str) -> None:
    layer, x = experts_case()
    told = _told(layer, x, linears=linear)
    assert sorted(m.direction for m in told) == sorted(DIRECTIONS)
    assert {m.formats for m in told if isinstance(m, Linear)} == {"e4m3 x e4m3 rowwise, emulated"}
    sizes = {(m.M, m.K, m.N) for m in told if isinstance(m, Linear)}
    assert sizes == {(256, 64, 192), (256, 96, 64)}


def test_known_scales_are_not_for_experts() -> None:
    layer, x = experts_case()
    told = _told(layer, x, linears="tensorwise", **{"linears.scaling": "delayed"})
    assert {m.formats for m in told if isinstance(m, Linear)} == {"e4m3 x e4m3 rowwise (experts: dynamic), emulated"}


@pytest.mark.parametrize("linear", ["blockwise", "mxfp8", "int8"])
def test_other_scales_leave_experts(linear: str) -> None:
    layer, x = experts_case()
    assert {why(m) for m in _told(layer, x, linears=linear)} == {OTHER_SCALES.format(linear=linear)}


def test_off_and_skips_leave_them_untouched() -> None:
    layer, x = experts_case()
    plain = text_of(joint_of(layer, x, linears="off"))
    assert "encode_part(" not in plain and "encode_weight(" not in plain

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = layer

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.mlp(x)
            return y

    reasons = {why(m) for m in _told(Model(), x, **{"linears.skip": ("mlp",)})}
    assert all("linears.skip" in reason for reason in reasons), reasons


def test_auto_leaves_them_on_a_device_whose_rates_are_known() -> None:
    layer, x = experts_case()
    reasons = {why(m) for m in _told(layer, x, linears="auto", **{"debug.device_rates": "h100"})}
    assert len(reasons) == 1 and "no time of a grouped matmul is predicted" in reasons.pop()


def test_without_units_they_stay() -> None:
    layer, x = experts_case()
    assert all("no FP8 matrix units" in why(m) for m in _told(layer, x, **{"linears.emulate": False}))


def test_a_router_stays_exact() -> None:
    """16 experts, so that its sizes are no reason."""
    layer, x = experts_case(experts=16)
    report = fp8compile.explain(layer, (x,), recipe=Recipe(linears={"emulate": True}))
    assert {why(m) for m in matmul_entries(report) if m.origin.module == "gate"} == {ROUTER}


def test_sizes_that_are_no_multiples_stay() -> None:
    assert {why(m) for m in _told(Grouped(inner=40), rows_of(64), ends_at(16, 32, 48, 64))} == {
        "N=40 is not a multiple of 16"
    }


class OtherDtype(Grouped):
    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(x, self.weight.transpose(1, 2), offs=ends, out_dtype=torch.bfloat16)


class OfColumns(Grouped):
    """The groups are columns of the right operand."""

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return F.grouped_mm(self.weight, x.t(), offs=ends)


@pytest.mark.parametrize(("kind", "reason"), [(OtherDtype, WITH_MORE), (OfColumns, NOT_OF_ROWS)])
def test_other_grouped_matmuls_stay(kind: Callable[[], Grouped], reason: str) -> None:
    told = _told(kind(), rows_of(64), ends_at(16, 32, 48, 64))
    assert told and {why(m) for m in told} == {reason}


def test_it_is_idempotent() -> None:
    shared = emulated()
    assert shared.owning_module is not None
    graph = copy_graph(shared.owning_module).graph
    before = len(graph.nodes)
    layer, _ = experts_case()
    context = Context(Recipe(linears={"emulate": True}), frozenset(range(len(list(layer.parameters())) + 1)))
    assert not quantize_linears(graph, context).linears
    graph.eliminate_dead_code()
    assert len(graph.nodes) == before


def test_a_weight_has_one_encoding_for_each_dimension_that_is_contracted() -> None:
    graph = emulated()
    made = {n.meta[SPLICED] for n in graph.nodes if str(n.meta.get(SPLICED, "")).startswith("encode_weight(")}
    assert len([n for n in graph.nodes if n.meta.get(SPLICED) in made and n.meta["val"].dtype == torch.float8_e4m3fn])
    assert len(made) == 2


def test_an_operator_of_transformers_own_is_told_of() -> None:
    """In FP32 a compiled model calls one for all matmuls of a layer's experts."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
    )
    block = transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock(config)
    block.experts.config._experts_implementation = "grouped_mm"
    report = fp8compile.explain(block, (torch.randn(1, 32, 32),), recipe=Recipe(linears={"emulate": True}))
    told = [why(m) for m in matmul_entries(report) if "experts" in m.origin.module]
    assert told == [OPAQUE, OPAQUE]
