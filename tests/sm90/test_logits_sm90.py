"""Lowered for an H100: logits in chunks, one at a time. The order of kernels and the lifetimes of buffers are Inductor's."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton, which compiles what Inductor generates, exists for Linux only")

from .run_logits import HIDDEN, LOSSES, TOKENS, WORDS, with_entropy
from .subprocesses import result_of

LOGITS = TOKENS * WORDS * 2
HIDDEN_STATES, WEIGHT = TOKENS * HIDDEN * 2, WORDS * HIDDEN * 2
CHUNK = TOKENS * 126 * 128 * 2  # of the backward: 8 chunks of multiples of 128 columns


@pytest.mark.sweep
@pytest.mark.parametrize("loss", [loss.__name__ for loss in LOSSES])
def test_one_chunk_at_a_time(loss: str) -> None:
    found = result_of("run_logits")[loss]
    whole, chunked = found["off"], found["auto"]
    assert whole[0]["peak_bytes"] >= LOGITS
    # The forward: a chunk of logits, hidden states, statistics.
    assert chunked[0]["peak_bytes"] <= LOGITS // 8 + 1.5 * HIDDEN_STATES
    # The backward: one chunk, whose gradient takes its place; dW and its parts, until they are joined; dh twice in FP32, h.
    assert chunked[1]["peak_bytes"] <= CHUNK + 2 * WEIGHT + 5 * HIDDEN_STATES < LOGITS
    matmuls = [len([e for e in half["externs"] if "mm" in e]) for half in chunked]
    assert matmuls == [8, 24 + 8 * (loss == with_entropy.__name__)]  # once more for its sums over all columns
