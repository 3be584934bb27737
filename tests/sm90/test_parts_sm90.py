"""The gradient of a split, generated for an H100: one kernel stores both parts, and does what the graph does."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton, which compiles what Inductor generates, exists for Linux only")

from .subprocesses import result_of

ROUNDINGS = 64  # of FP32, on the way through a gated MLP and back
PARTS = 3  # gate's, up's, and what the weight's gradient reads


def test_one_kernel_stores_both_parts_and_does_what_the_graph_does() -> None:
    found = result_of("run_parts", interpret=True)
    assert found["stores"] == [PARTS]
    assert max(found["differences"].values()) < ROUNDINGS * 2.0**-24, found["differences"]
