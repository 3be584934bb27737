"""A whole step lowered for an H100: an update is one kernel that moves what it must, and writes the codes of its weight."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton, which compiles what Inductor generates, exists for Linux only")

import torch

from fp8compile._version import release_of

from .run_whole_step import LAYERS
from .subprocesses import result_of

pytestmark = pytest.mark.skipif(
    release_of(torch.__version__) < (2, 12),
    reason="torch 2.11 writes no bytes into kernels of a few numbers, by which the harness counts",
)

# Of an element, in bytes: BF16 weight, gradient and new weight, two moments of one byte, read and written; and of each group
# of 128, two moments' amax in FP32 and exponent in one byte, read and written.
LEAST = 3 * 2 + 2 * 2 + 2 * 2 * 5 / 128
CODES = 1 + 2 * 4 / 128  # and two numbers a group, for the scale of the step behind the next


@pytest.mark.parametrize(
    ("case", "codes"), [("written", CODES), pytest.param("not written", 0.0, marks=pytest.mark.sweep)]
)
def test_an_update_is_one_kernel_that_moves_the_least_bytes_and_writes_codes(case: str, codes: float) -> None:
    found = result_of("run_whole_step", case)[case]
    assert found["updates"] == pytest.approx([LEAST + codes] * LAYERS, abs=0.002)
    assert found["spills"] and not any(found["spills"])


def test_no_other_kernel_reads_a_new_weight() -> None:
    """What is left to do behind an update: two numbers a group, and the codes turned where the backward takes them so."""
    behind = result_of("run_whole_step", "written")["written"]["behind"]
    assert len(behind) == 2 * LAYERS + 1, "an amax and a comparison each; the first layer has no dgrad"
    assert all(moved <= 2.0 for moved in behind)
