"""Lowered for an H100: a norm and the encoding of its result, one kernel where Inductor nests reductions (torch 2.15)."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton, which compiles what Inductor generates, exists for Linux only")

import torch

from fp8compile._version import release_of

from .run_norm import BF16_BYTES, CODE_AND_SCALE_BYTES, COLUMNS, NORMS
from .subprocesses import result_of

NESTED = release_of(torch.__version__) >= (2, 15)
WEIGHT_BYTES = 2 * COLUMNS


@pytest.mark.parametrize("norm", [norm.__name__ for norm in NORMS])
def test_what_a_norm_and_its_codes_move(norm: str) -> None:
    found = result_of("run_norm")[norm]
    in_one_kernel = 2 * BF16_BYTES + CODE_AND_SCALE_BYTES + WEIGHT_BYTES
    assert len(found["launches"]) == (1 if NESTED else 2)
    assert found["num_bytes"] == in_one_kernel + (
        0 if NESTED else BF16_BYTES
    )  # the second kernel reads the result again
    assert [cubin["spill_bytes"] for cubin in found["cubins"]] == [0] * len(found["cubins"]) != []
