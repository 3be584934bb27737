"""The dgrads of linears that read one input as one matmul: what is merged, what is not and why, and the numbers."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.fx import Graph

import fp8compile
from fp8compile.compiler.inductor import NOTHING_TO_MERGE
from fp8compile.linears import merged_dgrads as reasons
from fp8compile.numerics import E5M2
from fp8compile.passes.quantize_linears import quantize_linears
from fp8compile.recipe.context import Context
from fp8compile.recipe.recipe import Recipe
from fp8compile.reporting.report import Report
from tests.support.graphs import joint_of, text_of
from tests.support.measure import compiled, gradients, llama_case

OPTIONS = {"linears.scaling": "delayed", "linears.cache_weights": True, "linears.merge_dgrads": True, "saved": "off"}
aten = torch.ops.aten


@pytest.fixture
def fp8_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every device multiplies FP8: torch._scaled_mm exists for the CPU, if slowly."""
    module = sys.modules["fp8compile.linears.reasons"]
    monkeypatch.setattr(module, "fp8_unsupported_reason", lambda device: None)


class Two(nn.Module):
    """a and b read x; ``forward`` combines what they give."""

    def __init__(self, combine: Callable[..., Any] | None = None, bias: bool = False, size: int = 16) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 32, bias=bias), nn.Linear(64, size, bias=bias)
        self.combine = combine or (lambda model, x: (model.a(x), model.b(x)))

    def forward(self, x: Tensor) -> Any:
        return self.combine(self, x)


def data(rows: int = 48) -> Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()


def told(model: nn.Module, x: Tensor, **options: Any) -> dict[str, str]:
    """What the report says of each dgrad's merging."""
    run = compiled(model, **OPTIONS | options, **{"linears.emulate": True})
    out = run(x)
    torch.autograd.backward([y.float().square().mean() for y in (out if isinstance(out, tuple) else (out,))])
    return merging(fp8compile.report(run))


def merging(report: Report) -> dict[str, str]:
    dgrads = [each for each in report.linears if each.direction == "dgrad"]
    return {m.origin.module: "".join(re.findall(r", ((?:not )?merged.*)", m.formats)) for m in dgrads}


def in_one(run: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    """All results as one."""
    return lambda x: torch.cat([y.flatten() for y in run(x)])


def nearly(one: Tensor, other: Tensor) -> bool:
    """Whether two values differ by no more than the rounding of one operand to E5M2: half of its step, evenly spread."""
    return bool((one - other).norm() <= 2 * E5M2.half_ulp / 3**0.5 * one.norm())


def matmuls(graph: Graph) -> int:
    return sum(node.target in (aten.mm.default, aten.addmm.default, aten._scaled_mm.default) for node in graph.nodes)


@functools.cache
def emulated_layer() -> tuple[Graph, Report]:
    """A decoder layer whose matmuls are emulated: its joint graph, for tests that only read it, and its report."""
    layer, args = llama_case(2, 64, 64, 128, 4)
    graph = joint_of(layer, *args, **OPTIONS, **{"linears.emulate": True})
    return graph, fp8compile.report(layer)


def test_golden_joint_graph_of_two_linears(fp8_units: None) -> None:
    graph = text_of(joint_of(Two(), data(), **OPTIONS))
    assert_expected_inline(
        "".join(f"{line}\n" for line in graph.splitlines() if " = " in line),
        """\
permute_11: float8_e4m3fn[64, 16] = as_columns(primals_8)
permute_10: float8_e4m3fn[64, 32] = as_columns(primals_5)
slice_6: float32[1, 1] = inv_scale(primals_4)
permute_15: float8_e4m3fn[48, 64] = encode(primals_2, slice_6)
as_strided: float8_e4m3fn[48, 64] = encode(primals_2, slice_6)
slice_4: float32[1, 1] = inv_scale(primals_4)
as_strided_2: float8_e5m2[16, 48] = encode(tangents_2, slice_4)
slice_2: float32[1, 1] = inv_scale(primals_4)
amax: float32[1, 1] = balance(slice_2, slice_4, primals_7, primals_10, primals_12)
clamp_max_6: float32[1, 1] = balance(slice_2, slice_4, primals_7, primals_10, primals_12)
convert_element_type_6: float8_e5m2[48, 32] = encode(tangents_1, clamp_max_6)
clamp_max_7: float32[1, 1] = balance(slice_2, slice_4, primals_7, primals_10, primals_12)
convert_element_type_7: float8_e5m2[48, 16] = encode(tangents_2, clamp_max_7)
cat_1: float8_e5m2[48, 48] = side_by_side(convert_element_type_6, convert_element_type_7)
as_strided_5: float8_e5m2[32, 48] = encode(tangents_1, slice_2)
_scaled_mm: float32[48, 32] = scaled_mm(as_strided, permute_10, slice_6, primals_7)
_scaled_mm_1: float32[48, 16] = scaled_mm(as_strided, permute_11, slice_6, primals_10)
_scaled_mm_2: float32[16, 64] = scaled_mm(as_strided_2, permute_15, slice_4, slice_6)
_scaled_mm_3: float32[32, 64] = scaled_mm(as_strided_5, permute_15, slice_2, slice_6)
_scaled_mm_4: float32[48, 64] = scaled_mm(cat_1, primals_11, amax, primals_12)
full: float32[140, 4] = zeros(primals_4)
""",
    )


@pytest.mark.parametrize("emulate", [True, False])
def test_q_k_and_v_are_one_dgrad_and_so_are_gate_and_up(emulate: bool, fp8_units: None) -> None:
    layer, args = llama_case(2, 64, 64, 128, 4)
    graph = emulated_layer()[0] if emulate else joint_of(layer, *args, **OPTIONS)
    assert matmuls(graph) == 21 - 3
    graph.lint()


def test_the_report_says_with_what_a_dgrad_is_merged() -> None:
    _, report = emulated_layer()
    found = {m.origin.module: m.formats for m in report.linears if m.direction == "dgrad"}
    plain = "e5m2 x e4m3 delayed, cached weight, emulated"
    assert found["down"] == found["o"] == plain
    assert found["gate"] == f"{plain}, merged with up" and found["up"] == f"{plain}, merged with gate"
    assert {*found["q"].removeprefix(f"{plain}, merged with ").split(", ")} == {"k", "v"}
    others = [m.formats for m in report.linears if m.direction != "dgrad"]
    assert not any("merged" in formats for formats in others)


def test_nothing_is_merged_unless_asked_for() -> None:
    model = Two()
    apart = OPTIONS | {"linears.merge_dgrads": False, "linears.emulate": True}
    assert matmuls(joint_of(model, data(), **apart)) == 6
    assert merging(fp8compile.report(model)) == {"a": "", "b": ""}


def test_it_is_idempotent() -> None:
    graph = joint_of(model := Two(), data(), **OPTIONS, **{"linears.emulate": True})
    before = len(graph.nodes)
    context = Context(
        Recipe(**OPTIONS | {"linears.emulate": True}), frozenset(range(len(list(model.parameters())) + 1))
    )
    quantize_linears(graph, context)
    graph.eliminate_dead_code()
    assert len(graph.nodes) == before


# ------------------------------------------------------------------------------------------------------- declines


def not_merged(reason: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names or ("a", "b"), f"not merged: {reason}")


def test_reasons_to_leave_dgrads_apart() -> None:
    """Each of them in one model. The options that it needs are remarked on."""
    one = Two(lambda model, x: model.a(x) + model.b(x), size=32)
    assert told(one, data()) == not_merged(reasons.ONE_GRADIENT)
    turned = Two(lambda model, x: (model.a(x).t(), model.b(x)))
    assert told(turned, data()) == not_merged(reasons.TRANSPOSED)
    in_parts = Two(lambda model, x: (model.a(x), model.b(x.relu())))
    assert told(in_parts, data()) == {"a": "", "b": ""}, "they read no one input"
    modules = {"a": {"linears.formats": "e4m3"}}
    assert told(Two(), data(), modules=modules) == not_merged(reasons.NOT_ALIKE)
    assert told(Two(), data(), modules={"a": {"linears.merge_dgrads": False}}) == not_merged(reasons.NOT_ALIKE)
    dynamic = {"linears.scaling": "dynamic", "modules": {"c": {"linears.scaling": "delayed"}}}
    assert told(Two(), data(), **dynamic) == not_merged(reasons.NOT_KNOWN)
    uncached = {"linears.cache_weights": False, "modules": {"c": {"linears.cache_weights": True}}}
    assert told(Two(), data(), **uncached) == not_merged(reasons.NOT_CACHED)


class Three(Two):
    def __init__(self, **changes: Any) -> None:
        super().__init__(lambda model, x: (model.a(x), model.b(x), model.c(x)))
        self.c = nn.Linear(64, 32, bias=False)


def test_all_linears_of_an_input_or_none() -> None:
    """The codes of their weights come in as one matrix, which is laid out before it is known who is in FP8."""
    assert told(Three(), data(), **{"linears.skip": "c"}) == not_merged(reasons.NOT_PACKED)


def test_weights_that_are_multiplied_as_they_lie_are_left(fp8_units: None) -> None:
    """``x @ w``: the dgrad takes their other layout. The same weights are those of linears of one input elsewhere."""

    def combine(model: Two, x: Tensor) -> tuple[Tensor, ...]:
        y = x.sin()
        return *(F.linear(x, w) for w in weights(model)), *(y @ w for w in weights(model))

    model, x, found = Two(combine), data(), []
    model.a, model.b = (nn.Linear(64, 64, bias=False) for _ in range(2))
    for merge in (False, True):
        torch._dynamo.reset()
        run = compiled(model, **OPTIONS | {"linears.merge_dgrads": merge})
        found.append(gradients(model, in_one(run), (x,)))
    formats = [m.formats for m in fp8compile.report(run).linears if m.direction == "dgrad"]
    assert sum(each.endswith(", merged with a linear without a module") for each in formats) == 2
    assert sum(each.endswith(f", not merged: {reasons.NOT_PACKED}") for each in formats) == 2
    assert all(nearly(found[0][name], found[1][name]) for name in found[0])


def weights(model: Two) -> tuple[Tensor, Tensor]:
    return model.a.weight, model.b.weight


def test_a_weight_used_twice_on_one_input_is_left() -> None:
    model = Two(lambda model, x: (model.a(x), model.a(x).relu(), model.b(x)))
    assert {*told(model, data()).values()} == {f"not merged: {reasons.NOT_PACKED}"}


def test_linears_of_an_input_without_gradient_have_no_dgrads() -> None:
    assert told(Two(), data().detach()) == {}


@pytest.mark.parametrize(
    "missing", [{"linears.scaling": "dynamic"}, {"linears.cache_weights": False}, {"linears": "off"}]
)
def test_options_without_which_nothing_is_merged_are_remarked_on(missing: dict[str, Any]) -> None:
    recipe = Recipe().changed({"linears.emulate": True, **OPTIONS | missing})  # not judged as what is written
    report = fp8compile.explain(Two(), (data(),), recipe=recipe)
    assert NOTHING_TO_MERGE in report.remarks


def test_the_exact_twin_of_the_first_step_remarks_on_nothing() -> None:
    run = compiled(model := Two(), **OPTIONS, **{"linears.emulate": True, "debug.check": "first_step"})
    sum(y.sum() for y in run(data())).backward()
    assert NOTHING_TO_MERGE not in fp8compile.report(model).remarks


def test_results_that_a_loss_scaler_watches_stay() -> None:
    """In FP16 each result of a matmul is counted; nor are the inputs that hold codes, some without memory, watched."""
    x = data().detach().half().requires_grad_()
    assert told(Two().half(), x) == not_merged(reasons.NOT_SUMMED)
    assert told(Two().half(), x, **{"fp32.observe": False}) == {"a": "merged with b", "b": "merged with a"}
    assert told(Two(), data(), **{"fp32.observe": True, "linears.skip": "b"}) == {"a": ""}


def test_no_row_is_left_for_a_scale() -> None:
    with mock.patch("fp8compile.linears.slot.OPERANDS", 0), mock.patch("fp8compile.linears.slot.SPARE", 1):
        assert told(Two(), data()) == not_merged(reasons.NO_ROW)
