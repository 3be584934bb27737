"""Lowered for an H100: the step's kernel writes the weight's codes too, and reads nothing more for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton, which compiles what Inductor generates, exists for Linux only")

from fp8compile._version import release_of

from . import run_step_codes
from .subprocesses import result_of

pytestmark = pytest.mark.skipif(
    release_of(torch.__version__) < (2, 12),
    reason="torch 2.11 writes no bytes into kernels of a few numbers, by which the harness counts",
)

MOST = 1.02  # times the least possible
IN_CI = ("BF16, rounded stochastically",)
OTHERS = tuple(case for case in run_step_codes.NAMES if case not in IN_CI)
CASES = [*IN_CI, *(pytest.param(case, marks=pytest.mark.sweep) for case in OTHERS)]
TO_ENCODE = (
    6.0  # bytes an element of two kernels that read the weight for its amax, read it again, and write both layouts
)


def measures(case: str) -> dict[str, Any]:
    found: dict[str, Any] = result_of("run_step_codes", *(IN_CI if case in IN_CI else OTHERS))[case]
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_one_kernel_and_one_of_one_thread(case: str) -> None:
    """That one computes the scale, which all others read."""
    step = measures(case)["step"]
    one, whole = step["launches"]
    blocks = [cubin["blocks"] for cubin in step["cubins"] if cubin["kernel"] == one]
    assert blocks == [{"XBLOCK": 1}] and one != whole and not step["externs"]


@pytest.mark.parametrize("case", CASES)
def test_it_moves_what_it_must_and_three_bytes_an_element_in_place_of_six(case: str) -> None:
    found = measures(case)
    assert 0.99 < found["step"]["num_bytes"] / found["least_bytes"] <= MOST
    written = 1 + 2 * 4 / 128  # codes, and two numbers a group
    turned = found["finish"]["num_bytes"] / found["numel"]
    assert turned == pytest.approx(2 + 2 * 4 / 128, abs=0.01), (
        "reads the codes and what was measured, writes the codes"
    )
    assert written + turned < 3.2 < TO_ENCODE


@pytest.mark.parametrize("case", CASES)
def test_nothing_spills_and_no_code_is_stored_by_itself(case: str) -> None:
    for graph in (measures(case)["step"], measures(case)["finish"]):
        assert graph["scattered"] == []
        for kernel in {cubin["kernel"] for cubin in graph["cubins"]}:
            spilled = [c["spill_bytes"] for c in graph["cubins"] if c["kernel"] == kernel and c["timed"]]
            assert spilled and max(spilled) == 0, kernel


def test_codes_turned_in_the_step_s_own_kernel_would_move_several_times_the_bytes() -> None:
    """Why they are turned behind it: Inductor then stores what the step's groups have between its kernels, in FP32."""
    found = result_of("run_step_codes", "--turned")[run_step_codes.TURNED]
    assert found["turned"]["num_bytes"] > 1.5 * (found["step"]["num_bytes"] + found["finish"]["num_bytes"])
