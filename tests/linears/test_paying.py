"""``Recipe.linears.mode = "auto"``: what is not predicted to pay stays, with both figures; what pays has them too."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fp8compile
from fp8compile.cost.device_rates import RATES, DeviceRates
from fp8compile.linears import paying
from fp8compile.recipe import rates
from fp8compile.recipe.recipe import Recipe
from fp8compile.reporting.entries import LINEAR
from fp8compile.reporting.report import Report

ANY = DeviceRates("ANY", copy=1e6, bf16=1e-6, fp8=1.0, attention=1.0, attention_backward=1.0, gap=0.0, fp32=0.5e-6)
NO_COPY = DeviceRates("NO_COPY", copy=1e-6, bf16=1e3, fp8=1e3, attention=1.0, attention_backward=1.0, gap=0.0)


def report_of(**options: object) -> Report:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    options = {
        "linears": "auto",
        "linears.emulate": options.get("linears") != "off",
        "debug.codegen": "eager",
        **options,
    }
    torch.compile(model, backend="fp8compile", options=options)(torch.randn(64, 64)).sum().backward()
    return fp8compile.report(model)


def test_small_linears_stay_with_both_figures() -> None:
    report = report_of(**{"debug.device_rates": "h100"})
    left = report.notes.skipped(LINEAR)
    assert not report.linears and len(left) == 5
    assert all(
        skip.reason.startswith("FP8 does not pay: ") and "(predicted for H100)" in skip.reason for skip in left
    )


def test_all_of_a_linear_or_some_of_its_matmuls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "rates_of", lambda device: ANY)
    report = report_of()
    assert len(report.linears) == 5 and not report.notes.skipped(LINEAR)
    assert all(0 < linear.us < linear.us_in_its_dtype for linear in report.linears)
    assert all("tensorwise" in linear.formats for linear in report.linears)
    assert "these matmuls, predicted: " in str(report)

    monkeypatch.setattr(paying, "predicted", lambda shape, rates: paying.Predicted(("forward",), 1.0, 2.0, 3.0))
    report = report_of()
    assert {linear.direction for linear in report.linears} == {"forward"}
    reasons = {skip.reason for skip in report.notes.skipped(LINEAR)}
    assert reasons == {
        "FP8 does not pay: 3 us with encodings, 2 us in its dtype, 1 us with forward alone in FP8 (predicted for ANY)"
    }


def test_who_saves_too_little_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "rates_of", lambda device: ANY)
    monkeypatch.setattr(paying, "predicted", lambda shape, rates: paying.Predicted((), 2.0, 2.0, 1.98))
    assert {skip.reason for skip in report_of().notes.skipped(LINEAR)} == {
        "FP8 does not pay: 1.98 us with encodings, 2 us in its dtype, which saves less than 2% (predicted for ANY)"
    }


def test_bytes_decide_where_copies_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "rates_of", lambda device: NO_COPY)
    assert not report_of().linears


def test_of_a_device_without_rates_nothing_is_predicted_and_all_of_it_is_in_fp8() -> None:
    report = report_of()
    assert len(report.linears) == 5 and not report.notes.skipped(LINEAR)
    assert all(linear.us == linear.us_in_its_dtype == 0 for linear in report.linears)
    assert "predicted" not in str(report)


def test_it_is_the_default() -> None:
    assert Recipe().linears.mode == "auto" and report_of(linears=Recipe().linears.mode).linears == report_of().linears


def test_a_linear_counts_in_the_dtype_that_it_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(rates, "rates_of", lambda device: ANY)
    monkeypatch.setattr(paying, "predicted", lambda shape, rates: seen.append(shape) or paying.Predicted((), 0, 0, 0))
    report_of()
    assert {shape.itemsize for shape in seen} == {4}
    with torch.autocast("cpu", torch.bfloat16):
        report_of()
    assert {shape.itemsize for shape in seen[2:]} == {2}


def test_fp32_is_multiplied_in_tf32_where_torch_may() -> None:
    named, before = Recipe(debug={"device_rates": "h200"}), torch.backends.cuda.matmul.allow_tf32
    try:
        for allowed, expected in ((False, RATES["h200"]), (True, RATES["h200"].with_tf32)):
            torch.backends.cuda.matmul.allow_tf32 = allowed
            assert rates.rates_for(torch.device("cpu"), named) == expected
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert rates.rates_for(torch.device("cpu"), Recipe()) is None


def test_linears_of_one_input_share_its_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(rates, "rates_of", lambda device: ANY)
    monkeypatch.setattr(paying, "predicted", lambda shape, rates: seen.append(shape) or paying.Predicted((), 0, 0, 0))

    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.o = nn.Linear(64, 64), nn.Linear(64, 32), nn.Linear(32, 64, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.q(x) + self.o(self.k(x))

    torch._dynamo.reset()
    options = {"linears": "auto", "linears.emulate": True, "debug.codegen": "eager"}
    torch.compile(Three(), backend="fp8compile", options=options)(torch.randn(48, 64)).sum().backward()
    assert {(s.M, s.K, s.N, s.sharing) for s in seen} == {(48, 64, 64, 2), (48, 64, 32, 2), (48, 32, 64, 1)}
    assert {s.directions for s in seen} == {("forward", "wgrad"), ("forward", "dgrad", "wgrad")}


@pytest.mark.parametrize("other", ["tensorwise", "rowwise", "off"])
def test_other_recipes_ask_nothing(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(paying, "predicted", unexpected)
    report = report_of(linears=other, **{"debug.device_rates": "h100"})
    assert all(linear.us == linear.us_in_its_dtype == 0 for linear in report.linears)
