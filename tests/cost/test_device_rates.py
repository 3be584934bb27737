"""Rates of devices: the H200's are those that one of them told, the others' are shares; names as drivers give them."""

from __future__ import annotations

import json
from statistics import fmean
from typing import Any

import pytest

from fp8compile.cost.device_rates import RATES, rates_named, with_attention
from tests.support.sources import ROOT

H200 = RATES["h200"]
A_LAYERS_WEIGHTS = 4 * 4096**2 + 3 * 4096 * 11008  # Llama-2-7B's
FORWARD, BACKWARD = 4, 10  # operations of attention, of a pair of query and key and a column


def told(name: str) -> list[dict[str, Any]]:
    lines = (ROOT / f"benchmarks/results/first-contact-h200-{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def matmuls_us(job: str) -> float:
    """Of cuBLAS' kernels, of one forward and backward."""
    [profile] = [fact["kernels"] for fact in told("2a") if fact["job"] == job and "kernels" in fact]
    return sum(us for kernel, _, us in profile if "nvjet" in kernel or "splitK" in kernel)


def test_the_copy_is_what_an_h200_told() -> None:
    [copy] = [fact["gb_s"] for fact in told("1") if fact["what"] == "copy"]
    assert H200.copy == pytest.approx(copy / 1000, rel=1e-3)


def test_matmuls_are_what_an_h200_told() -> None:
    """Those of a Llama-2-7B layer with 16,384 tokens: forward, dgrad and wgrad."""
    operations = 3 * 2 * 8 * 2048 * A_LAYERS_WEIGHTS
    assert H200.bf16 == pytest.approx(operations / matmuls_us("layer-inductor-7b") / 1e6, rel=1e-3)
    ours = [operations / matmuls_us(f"layer-{arm}-7b") / 1e6 for arm in ("default", "linears")]
    assert H200.fp8 == pytest.approx(fmean(ours), rel=5e-3)


def test_attention_is_what_an_h200_told() -> None:
    runs = [fact for fact in told("1") if fact["what"].startswith("sdpa")]
    forward = [run["tflops_forward"] for run in runs]
    backward = [
        run["tflops_forward"] * BACKWARD / FORWARD * run["forward"] / (run["both"] - run["forward"]) for run in runs
    ]
    assert len(runs) == 4
    assert (H200.attention, H200.attention_backward) == pytest.approx((fmean(forward), fmean(backward)), rel=2e-3)


def test_others_are_assumed_to_reach_the_same_shares() -> None:
    h100, b200 = RATES["h100"], RATES["b200"]
    assert (h100.bf16, h100.fp8, h100.gap) == (H200.bf16, H200.fp8, H200.gap)
    assert h100.copy == pytest.approx(H200.copy * 3.35 / 4.8)
    assert b200.fp8 == pytest.approx(H200.fp8 * 4500 / 1979)


def test_attention_is_one_of_three_kernels() -> None:
    h100 = RATES["h100"]
    usual, older, faster = (with_attention(h100, kernel) for kernel in ("cuDNN", "FA2", "FA3"))
    assert (usual.attention, usual.attention_backward) == pytest.approx((h100.attention, h100.attention_backward))
    assert (older.attention, older.attention_backward) == pytest.approx((370, 318))
    assert (faster.attention, faster.attention_backward) == pytest.approx((646, 559))
    assert faster.bf16 == h100.bf16 and RATES["b200"].attention == pytest.approx(612 * 2250 / 989)


def test_no_device_is_slower_in_fp8_than_in_16_bit_and_none_beats_its_sheet() -> None:
    sheets = {
        "h100": (3.35, 67, 989, 1979),
        "h200": (4.8, 67, 989, 1979),
        "b200": (8, 75, 2250, 4500),
        "mi300x": (5.3, 163.4, 1307, 2615),
    }
    assert RATES.keys() == sheets.keys()
    for name, (copy, fp32, bf16, fp8) in sheets.items():
        rates = RATES[name]
        assert rates.bf16 < rates.fp8 < fp8 and rates.bf16 < bf16 and rates.copy < copy
        assert 0.7 * fp32 < rates.fp32 < fp32 and rates.with_tf32.fp32 == rates.bf16 / 2
        assert rates.attention_backward < rates.attention < rates.bf16


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA GeForce RTX 4090", None),
        ("NVIDIA GB200", None),  # another memory, another clock
    ],
)
def test_drivers_names(driver: str, name: str | None) -> None:
    found = rates_named(driver)
    assert (found and found.name) == name
