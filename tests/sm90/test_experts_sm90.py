"""Experts in FP8 lowered for an H100: Inductor takes each grouped matmul of codes, in the order that it asks for."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton, which compiles what Inductor generates, exists for Linux only")

from .subprocesses import result_of

GROUPED = "extern_kernels._scaled_grouped_mm"


@pytest.mark.sweep
def test_all_matmuls_of_experts_are_of_codes() -> None:
    forward, backward = result_of("run_experts")["externs"]
    assert (forward.count(GROUPED), backward.count(GROUPED)) == (2, 4)
    assert not [name for name in forward + backward if name.endswith("._grouped_mm")]
