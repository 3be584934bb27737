"""Lowered for an H100: a memory budget's predicted peak beside that of the buffers in what Inductor generates."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("triton", reason="triton, which compiles what Inductor generates, exists for Linux only")

from .run_budget import BUDGETS, STORAGES
from .subprocesses import result_of

pytestmark = pytest.mark.sweep


@pytest.mark.parametrize("storage", STORAGES)
def test_the_peak_is_the_predicted_one_and_falls(storage: str) -> None:
    found = [result_of("run_budget")[storage][str(budget)] for budget in BUDGETS]
    peaks = [max(each["forward"], each["backward"]) for each in found]
    assert all(tighter <= looser for looser, tighter in itertools.pairwise(peaks))
    assert peaks[2] < 0.6 * peaks[0]
    assert all(peak == pytest.approx(each["predicted"], rel=0.01) for peak, each in zip(peaks, found, strict=True))
