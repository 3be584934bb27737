"""The dgrads of linears that read one input as one matmul: the numbers, against dgrads apart and against float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from tests.linears.test_merged_dgrads import OPTIONS, Two, data, fp8_units, in_one, merging, nearly
from tests.support.measure import compiled, gradient_sqnr, gradients, llama_case
from tests.support.reference import sqnr_db

__all__ = ["fp8_units"]


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
    apart, merged = (
        step(model, x, **{"linears.emulate": emulate, "linears.merge_dgrads": each}) for each in (False, True)
    )
    assert torch.equal(apart["a.weight"], merged["a.weight"])
    assert torch.equal(apart["b.weight"], merged["b.weight"])
    exact = gradients(model, in_one(model), (x,))["arg0"]
    assert not torch.equal(apart["arg0"], merged["arg0"])
    assert sqnr_db(exact, merged["arg0"]) > sqnr_db(exact, apart["arg0"]) - 0.5


def test_emulated_is_scaled_but_for_the_order_of_sums(fp8_units: None) -> None:
    model, x = Two(), data()
    emulated, scaled = (step(model, x, **{"linears.emulate": each}) for each in (True, False))
    for name, value in emulated.items():
        assert torch.allclose(value, scaled[name], rtol=1e-5, atol=1e-6 * float(value.abs().max())), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_a_layer_are_as_good_as_with_dgrads_apart(dtype: torch.dtype) -> None:
    layer, args = llama_case(2, 64, 128, 256, 4, dtype=dtype)
    found = []
    for merge in (False, True):
        torch._dynamo.reset()
        run = compiled(layer, **OPTIONS | {"linears.merge_dgrads": merge}, **{"linears.emulate": True})
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
    found = step(model, x, **{"linears.emulate": False})
    exact = gradients(model, in_one(model), (x,))
    for name in found:
        error = (found[name] - exact[name]).norm() / exact[name].norm()
        assert error < 0.1, name


def test_what_else_is_added_stays_added(fp8_units: None) -> None:
    """A residual around both, as in a post-norm layer."""
    model, x = Two(lambda model, x: (model.a(y := x.tanh()), model.b(y), y)), data()
    for emulate in (True, False):
        apart, merged = (
            step(model, x, **{"linears.emulate": emulate, "linears.merge_dgrads": each}) for each in (False, True)
        )
        assert nearly(apart["arg0"], merged["arg0"])
    assert merging(fp8compile.report(model)) == {"a": "merged with b", "b": "merged with a"}


def test_biases_are_left_where_they_are(fp8_units: None) -> None:
    model, x = Two(bias=True), data()
    apart, merged = (
        step(model, x, **{"linears.emulate": False, "linears.merge_dgrads": each}) for each in (False, True)
    )
    assert all(torch.equal(apart[n], merged[n]) for n in apart if n != "arg0") and len(apart) == 5
    assert nearly(apart["arg0"], merged["arg0"])


def test_a_frozen_weight_is_merged_and_its_gradient_measured(fp8_units: None) -> None:
    """Without wgrad no codes are under the row's own scale: statistics are taken under the one that is used."""
    model, x = Two(), data()
    model.b.requires_grad_(False)
    apart, merged = (
        step(model, x, **{"linears.emulate": False, "linears.merge_dgrads": each}) for each in (False, True)
    )
    assert nearly(apart["arg0"], merged["arg0"])
    labels = {operand.label for _, each in fp8compile.tools.scaling_state(model).graphs for operand in each.operands}
    assert {"a.gradient", "b.gradient"} <= labels


def test_histories_are_those_of_dgrads_apart(fp8_units: None) -> None:
    """What a wgrad clips is counted under its own scale."""
    first, found = Two(), []
    with torch.no_grad():
        first.b.weight.mul_(2.0**-6)
    for merge in (False, True):
        model = copy.deepcopy(first)
        step(model, data(), steps=2, **{"linears.emulate": False, "linears.merge_dgrads": merge})
        step_larger(model, merge)
        ((_, histories),) = fp8compile.tools.scaling_state(model).graphs
        found.append({o.label: row for o, row in zip(histories.operands, histories.totals.tolist(), strict=True)})
    assert found[0] == found[1] and found[0]["b.gradient"][0] > 0


def step_larger(model: nn.Module, merge: bool) -> None:
    torch._dynamo.reset()
    run = compiled(model, **OPTIONS | {"linears.merge_dgrads": merge})
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
            options={"debug.codegen": "eager", **OPTIONS, "linears.merge_dgrads": merge},
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
