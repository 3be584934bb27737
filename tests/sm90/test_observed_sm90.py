"""Counting values and gradients of an FP16 layer, lowered for sm_90: what it costs in bytes."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton, which compiles what Inductor generates, exists for Linux only")

from .fake_h100 import figures
from .subprocesses import result_of

MM = 2 * (4 * 4096 * 4096 + 3 * 4096 * 11008)  # bytes of the weights' gradients, which leave products
ACTIVATION = 2 * 16384 * 4096
# What torch 2.11 moves beside: it counts some values of the forward in kernels that read them once more.
AGAIN = figures({"bytes": 0}, oldest={"bytes": 4.62 * ACTIVATION})["bytes"]


@pytest.mark.sweep
def test_what_counting_moves_at_16k_tokens() -> None:
    """At most 1 % beside one read of what leaves products and the clip of the gradient that comes in."""
    graphs = result_of("run_observed")["graphs"]
    off, on = (sum(graph["num_bytes"] for graph in graphs[name]) for name in ("off", "on"))
    assert on - off < MM + ACTIVATION + 0.01 * off + AGAIN
    assert on < 1.06 * off + AGAIN
