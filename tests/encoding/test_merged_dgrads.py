"""The dgrads of linears that read one input as one matmul: what is merged, what is not and why, and the numbers."""

from __future__ import annotations

import copy
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
from fp8compile.encoding import merged_dgrads as reasons
from fp8compile.numerics import E5M2
from fp8compile.passes.quantize_linears import quantize_linears
from fp8compile.recipe.context import Context
from fp8compile.recipe.recipe import Recipe
from tests.support.graphs import joint_of, text_of
from tests.support.measure import compiled, gradient_sqnr, gradients, llama_case
from tests.support.reference import sqnr_db

OPTIONS = {"linear_scaling": "delayed", "cache_weights": True, "merge_dgrads": True, "saved": "off"}
aten = torch.ops.aten


@pytest.fixture
def fp8_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every device multiplies FP8: torch._scaled_mm exists for the CPU, if slowly."""
    module = sys.modules["fp8compile.passes.quantize_linears"]
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
    run = compiled(model, emulate=True, **OPTIONS | options)
    out = run(x)
    torch.autograd.backward([y.float().square().mean() for y in (out if isinstance(out, tuple) else (out,))])
    dgrads = [each for each in fp8compile.report(run).linears if each.direction == "dgrad"]
    return {m.origin.module: "".join(re.findall(r", ((?:not )?merged.*)", m.formats)) for m in dgrads}


def in_one(run: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    """All results as one."""
    return lambda x: torch.cat([y.flatten() for y in run(x)])


def matmuls(graph: Graph) -> int:
    return sum(node.target in (aten.mm.default, aten.addmm.default, aten._scaled_mm.default) for node in graph.nodes)


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
    graph = joint_of(layer, *args, emulate=emulate, **OPTIONS)
    assert matmuls(graph) == 21 - 3
    graph.lint()


def test_the_report_says_with_what_a_dgrad_is_merged() -> None:
    layer, args = llama_case(2, 64, 64, 128, 4)
    run = compiled(layer, emulate=True, **OPTIONS)
    run(*args).float().square().mean().backward()
    found = {m.origin.module: m.formats for m in fp8compile.report(run).linears if m.direction == "dgrad"}
    plain = "e5m2 x e4m3 delayed, cached weight, emulated"
    assert found["down"] == found["o"] == plain
    assert found["gate"] == f"{plain}, merged with up" and found["up"] == f"{plain}, merged with gate"
    assert {*found["q"].removeprefix(f"{plain}, merged with ").split(", ")} == {"k", "v"}
    others = [m.formats for m in fp8compile.report(run).linears if m.direction != "dgrad"]
    assert not any("merged" in formats for formats in others)


def test_nothing_is_merged_unless_asked_for() -> None:
    layer, args = llama_case(2, 64, 64, 128, 4)
    assert matmuls(joint_of(layer, *args, emulate=True, **OPTIONS | {"merge_dgrads": False})) == 21
    assert told(Two(), data(), merge_dgrads=False) == {"a": "", "b": ""}


def test_it_is_idempotent() -> None:
    layer, args = llama_case(2, 64, 64, 128, 4)
    graph = joint_of(layer, *args, emulate=True, **OPTIONS)
    before = len(graph.nodes)
    context = Context(Recipe(emulate=True, **OPTIONS), frozenset(range(len(list(layer.parameters())) + 3)))
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
    in_parts = Two(lambda model, x: (model.a(x), model.b(x.relu())))
    assert told(in_parts, data()) == {"a": "", "b": ""}, "they read no one input"
    modules = {"a": {"linear_formats": "e4m3"}}
    assert told(Two(), data(), modules=modules) == not_merged(reasons.NOT_ALIKE)
    assert told(Two(), data(), modules={"a": {"merge_dgrads": False}}) == not_merged(reasons.NOT_ALIKE)
    dynamic = {"linear_scaling": "dynamic", "modules": {"c": {"linear_scaling": "delayed"}}}
    assert told(Two(), data(), **dynamic) == not_merged(reasons.NOT_KNOWN)
    uncached = {"cache_weights": False, "modules": {"c": {"cache_weights": True}}}
    assert told(Two(), data(), **uncached) == not_merged(reasons.NOT_CACHED)


class Three(Two):
    def __init__(self, **changes: Any) -> None:
        super().__init__(lambda model, x: (model.a(x), model.b(x), model.c(x)))
        self.c = nn.Linear(64, 32, bias=False)


def test_all_linears_of_an_input_or_none() -> None:
    """The codes of their weights come in as one matrix, which is laid out before it is known who is in FP8."""
    assert told(Three(), data(), linear_skip="c") == not_merged(reasons.NOT_PACKED)


def test_weights_that_are_multiplied_as_they_lie_are_left(fp8_units: None) -> None:
    """``x @ w``: the dgrad takes their other layout. The same weights are those of linears of one input elsewhere."""

    def combine(model: Two, x: Tensor) -> tuple[Tensor, ...]:
        y = x.sin()
        return *(F.linear(x, w) for w in weights(model)), *(y @ w for w in weights(model))

    model, x, found = Two(combine), data(), []
    model.a, model.b = (nn.Linear(64, 64, bias=False) for _ in range(2))
    for merge in (False, True):
        torch._dynamo.reset()
        run = compiled(model, **OPTIONS | {"merge_dgrads": merge})
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


@pytest.mark.parametrize("missing", [{"linear_scaling": "dynamic"}, {"cache_weights": False}, {"linear": "off"}])
def test_options_without_which_nothing_is_merged_are_remarked_on(missing: dict[str, Any]) -> None:
    report = fp8compile.explain(Two(), (data(),), recipe=Recipe(emulate=True, **OPTIONS | missing))
    assert NOTHING_TO_MERGE in report.remarks


def test_the_exact_twin_of_the_first_step_remarks_on_nothing() -> None:
    run = compiled(model := Two(), emulate=True, check="first_step", **OPTIONS)
    sum(y.sum() for y in run(data())).backward()
    assert NOTHING_TO_MERGE not in fp8compile.report(model).remarks


# -------------------------------------------------------------------------------------------------------- numbers


def nearly(one: Tensor, other: Tensor) -> bool:
    """Whether two values differ by no more than the rounding of one operand to E5M2: half of its step, evenly spread."""
    return bool((one - other).norm() <= 2 * E5M2.half_ulp / 3**0.5 * one.norm())


def step(model: nn.Module, x: Tensor, steps: int = 3, **options: Any) -> dict[str, Tensor]:
    """Gradients of a step whose scales are known."""
    torch._dynamo.reset()
    run = compiled(model, **OPTIONS | options)
    for _ in range(steps):
        found = gradients(model, in_one(run), (x,))
    return found


@pytest.mark.parametrize("emulate", [True, False])
def test_only_the_sum_changes(emulate: bool, fp8_units: None) -> None:
    """wgrads to the bit; the gradient of the input by codes under another scale, which are as good."""
    model, x = Two().requires_grad_(), data()
    with torch.no_grad():
        model.b.weight.mul_(2.0**-5)
    apart, merged = (step(model, x, emulate=emulate, merge_dgrads=each) for each in (False, True))
    assert torch.equal(apart["a.weight"], merged["a.weight"])
    assert torch.equal(apart["b.weight"], merged["b.weight"])
    exact = gradients(model, in_one(model), (x,))["arg0"]
    assert not torch.equal(apart["arg0"], merged["arg0"])
    assert sqnr_db(exact, merged["arg0"]) > sqnr_db(exact, apart["arg0"]) - 0.5


def test_emulated_is_scaled_but_for_the_order_of_sums(fp8_units: None) -> None:
    model, x = Two(), data()
    emulated, scaled = (step(model, x, emulate=each) for each in (True, False))
    for name, value in emulated.items():
        assert torch.allclose(value, scaled[name], rtol=1e-5, atol=1e-6 * float(value.abs().max())), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_a_layer_are_as_good_as_with_dgrads_apart(dtype: torch.dtype) -> None:
    layer, args = llama_case(2, 64, 128, 256, 4, dtype=dtype)
    found = []
    for merge in (False, True):
        torch._dynamo.reset()
        run = compiled(layer, emulate=True, **OPTIONS | {"merge_dgrads": merge})
        gradients(layer, run, args)
        found.append(gradient_sqnr(layer, run, args))
    changes = {name: found[1][name] - found[0][name] for name in found[0]}
    assert sum(changes.values()) / len(changes) > -0.5 and min(changes.values()) > -2, (
        "a norm's weight has 128 elements"
    )


def test_a_weight_of_zeros_learns(fp8_units: None) -> None:
    """As that of a new adapter: its wgrad keeps a scale of its own."""
    model, x = Two(), data()
    with torch.no_grad():
        model.b.weight.zero_()
    found = step(model, x, emulate=False)
    exact = gradients(model, in_one(model), (x,))
    for name in found:
        error = (found[name] - exact[name]).norm() / exact[name].norm()
        assert error < 0.1, name


def test_what_else_is_added_stays_added(fp8_units: None) -> None:
    """A residual around both, as in a post-norm layer."""
    model, x = Two(lambda model, x: (model.a(y := x.tanh()), model.b(y), y)), data()
    for emulate in (True, False):
        apart, merged = (step(model, x, emulate=emulate, merge_dgrads=each) for each in (False, True))
        assert nearly(apart["arg0"], merged["arg0"])
    assert told(model, x) == {"a": "merged with b", "b": "merged with a"}


def test_biases_are_left_where_they_are(fp8_units: None) -> None:
    model, x = Two(bias=True), data()
    apart, merged = (step(model, x, emulate=False, merge_dgrads=each) for each in (False, True))
    assert all(torch.equal(apart[n], merged[n]) for n in apart if n != "arg0") and len(apart) == 5
    assert nearly(apart["arg0"], merged["arg0"])


def test_a_frozen_weight_is_merged_and_its_gradient_measured(fp8_units: None) -> None:
    """Without wgrad no codes are under the row's own scale: statistics are taken under the one that is used."""
    model, x = Two(), data()
    model.b.requires_grad_(False)
    apart, merged = (step(model, x, emulate=False, merge_dgrads=each) for each in (False, True))
    assert nearly(apart["arg0"], merged["arg0"])
    labels = {operand.label for _, each in fp8compile.scaling_state(model).graphs for operand in each.operands}
    assert {"a.gradient", "b.gradient"} <= labels


def test_histories_are_those_of_dgrads_apart(fp8_units: None) -> None:
    """What a wgrad clips is counted under its own scale."""
    first, found = Two(), []
    with torch.no_grad():
        first.b.weight.mul_(2.0**-6)
    for merge in (False, True):
        model = copy.deepcopy(first)
        step(model, data(), emulate=False, merge_dgrads=merge, steps=2)
        step_larger(model, merge)
        ((_, histories),) = fp8compile.scaling_state(model).graphs
        found.append({o.label: row for o, row in zip(histories.operands, histories.totals.tolist(), strict=True)})
    assert found[0] == found[1] and found[0]["b.gradient"][0] > 0


def step_larger(model: nn.Module, merge: bool) -> None:
    torch._dynamo.reset()
    run = compiled(model, **OPTIONS | {"merge_dgrads": merge})
    for size in (1.0, 8.0):
        (size * sum(y.sin().sum() for y in run(data()))).backward()


@pytest.mark.parametrize("kind", ["autocast", "dynamic shapes", "rows in three dimensions"])
def test_other_ways_to_run(kind: str, fp8_units: None) -> None:
    model, x = Two(), data()
    if kind == "rows in three dimensions":
        x = x.detach().view(4, 12, 64).requires_grad_()
    found = []
    for merge in (False, True):
        torch._dynamo.reset()
        dynamic = True if kind == "dynamic shapes" else None
        run = torch.compile(
            model,
            backend="fp8compile",
            options={"codegen": "eager", **OPTIONS, "merge_dgrads": merge},
            dynamic=dynamic,
        )
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
                out = run(x)
            x.grad = None
            sum(y.float().square().mean() for y in out).backward()
        assert x.grad is not None
        found.append(x.grad.float())
        merged = [m.formats for m in fp8compile.report(run).linears if ", merged with" in m.formats]
        assert len(merged) == 2 * merge
    assert nearly(*found)


def test_results_that_a_loss_scaler_watches_stay() -> None:
    """In FP16 each result of a matmul is counted; nor are the inputs that hold codes, some without memory, watched."""
    x = data().detach().half().requires_grad_()
    assert told(Two().half(), x) == not_merged(reasons.NOT_SUMMED)
    assert told(Two().half(), x, observe=False) == {"a": "merged with b", "b": "merged with a"}
    assert told(Two(), data(), observe=True, linear_skip="b") == {"a": ""}


def test_no_row_is_left_for_a_scale() -> None:
    with mock.patch("fp8compile.scaling.slot.OPERANDS", 0), mock.patch("fp8compile.scaling.slot.SPARE", 1):
        assert told(Two(), data()) == not_merged(reasons.NO_ROW)
