"""Rates of devices: the H100's are those that predictions state; names as drivers give them."""

from __future__ import annotations

import pytest

from fp8compile.planning.device_rates import RATES, rates_named, with_attention


def test_the_h100_is_as_its_file_says() -> None:
    h100 = RATES["h100"]
    assert (h100.copy, h100.bf16, h100.fp8) == pytest.approx((3.0, 650, 1150))
    assert (h100.attention, h100.attention_backward, h100.gap) == pytest.approx((370, 318, 1.5))


def test_attention_is_either_of_two_kernels() -> None:
    h100 = RATES["h100"]
    usual, faster = (with_attention(h100, kernel) for kernel in ("FA2", "FA3"))
    assert (usual.attention, usual.attention_backward) == pytest.approx((h100.attention, h100.attention_backward))
    assert (faster.attention, faster.attention_backward) == pytest.approx((646, 559))
    assert faster.bf16 == h100.bf16 and RATES["b200"].attention == pytest.approx(370 * 2250 / 989)


def test_no_device_is_slower_in_fp8_than_in_16_bit_and_none_beats_its_sheet() -> None:
    sheets = {
        "h100": (3.35, 989, 1979),
        "h200": (4.8, 989, 1979),
        "b200": (8, 2250, 4500),
        "mi300x": (5.3, 1307, 2615),
    }
    assert RATES.keys() == sheets.keys()
    for name, (copy, bf16, fp8) in sheets.items():
        rates = RATES[name]
        assert rates.bf16 < rates.fp8 < fp8 and rates.bf16 < bf16 and rates.copy < copy
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
