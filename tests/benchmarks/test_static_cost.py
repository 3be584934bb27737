"""The roofline and the memory tables of benchmarks/studies/static_*.py, against counts by hand. No kernel is generated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.studies import static_memory
from benchmarks.studies.static_cost import H100, Cost, Extern, cost, predictions, rates_of
from fp8compile.cost.device_rates import DeviceRates

RATES = DeviceRates("", copy=2.0, bf16=500.0, fp8=1000.0, attention=400.0, attention_backward=250.0)
TERA = 10**12


def test_generated_bytes_take_their_time_at_the_copy_rate() -> None:
    assert cost(2 * TERA // 1000, [], RATES, causal=False) == Cost(1.0, 0.0, 0.0)


@pytest.mark.parametrize(("name", "expected"), [("mm", 2.0), ("addmm", 2.0), ("_scaled_mm", 1.0)])
def test_a_product_runs_at_the_rate_of_its_dtype(name: str, expected: float) -> None:
    assert cost(0, [Extern(name, 0, TERA)], RATES, causal=False).products == pytest.approx(expected)


def test_a_thin_product_takes_as_long_as_its_bytes() -> None:
    assert cost(0, [Extern("mm", 2 * TERA, 1)], RATES, causal=False).products == pytest.approx(1000.0)


def test_causal_attention_is_half_the_operations() -> None:
    flash = [Extern("_scaled_dot_product_flash_attention_backward", 0, TERA)]
    assert cost(0, flash, RATES, causal=False).attention == pytest.approx(4.0)
    assert cost(0, flash, RATES, causal=True).attention == pytest.approx(2.0)


def test_attention_has_a_rate_for_each_direction_and_kernel() -> None:
    forward = [Extern("_scaled_dot_product_flash_attention", 0, TERA)]
    assert cost(0, forward, RATES, causal=False).attention == pytest.approx(2.5)
    found = predictions(lambda rates: cost(0, forward, rates, causal=False), H100)["predicted_ms"]
    gap = H100.gap / 1e3
    assert (found["total"] - gap, found["total_with_fa3"] - gap) == pytest.approx((1000 / 370, 1000 / 646))


def test_each_kernel_and_each_call_of_a_library_waits_once() -> None:
    assert cost(0, [Extern("mm", 0, 0)], replace(RATES, gap=2.0), causal=False, launches=4).gaps == pytest.approx(
        0.01
    )
    assert cost(0, [], RATES, causal=False).total == 0.0


def test_rates_are_named_and_positive() -> None:
    assert rates_of("copy=2.8,bf16=600") == replace(H100, copy=2.8, bf16=600.0)
    for wrong in ("bf61=1", "copy=0", "copy=fast"):
        with pytest.raises(ValueError, match=wrong):
            rates_of(wrong)


@pytest.mark.parametrize(("name", "billions"), [("7B", 6.738), ("13B", 13.016), ("30B", 32.529)])
def test_models_have_the_parameters_that_they_are_known_for(name: str, billions: float) -> None:
    assert static_memory.MODELS[name].parameters / 1e9 == pytest.approx(billions, abs=0.001)


def test_memory_is_sharded_but_for_activations_logits_and_gathered_layers() -> None:
    model = static_memory.Model(layers=1, hidden=1024, ffn=0, vocabulary=1)
    setup = static_memory.Setup("", weights=2, gradients=2, states=12)
    one, four = (static_memory.predicted(model, setup, units=8.0, gpus=n, batch=1) for n in (1, 4))
    assert four["states"] == one["states"] / 4 and four["gradients"] == one["gradients"] / 4
    assert four["weights"] == pytest.approx(one["weights"] / 4 + 2 * model.layer_parameters * 2 / 1e9)
    assert four["activations"] == one["activations"] == 8 * 2 * 2048 * 1024 / 1e9
    assert one["total"] == pytest.approx(sum(value for part, value in one.items() if part != "total"))
