"""A Llama layer in four bits, lowered for an H100: what is decoded is never written, and no kernel spills.

Encoding is not fused with what makes a value: codes are packed in words, so its loops are shorter than the producers'. Each
encoded value is read once more, 5.6 U in all.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="triton, which compiles what Inductor generates, exists for Linux only")

from .fake_h100 import MADE_FOR, installed
from .layers import CASES, STORAGE
from .run_few_bits import ALONE, CASE
from .subprocesses import result_of

pytestmark = pytest.mark.sweep

FIGURES = {STORAGE: (9, 9, 67.4), ALONE: (13, 14, 70.9)}  # kernels forward and backward, units moved


def graphs(pipeline: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = result_of("run_few_bits")[pipeline]
    return found


@pytest.mark.skipif(installed()["torch"] != MADE_FOR["torch"], reason="figures of other versions are not known")
@pytest.mark.parametrize("pipeline", [STORAGE, ALONE])
def test_kernels_and_units_moved(pipeline: str) -> None:
    forward, backward, units = FIGURES[pipeline]
    found = graphs(pipeline)
    assert [len(graph["launches"]) for graph in found] == [forward, backward]
    moved = sum(graph["num_bytes"] for graph in found) / CASES[CASE].unit
    assert abs(moved - units) < 0.1, moved


def test_no_kernel_spills_and_no_store_is_scattered() -> None:
    for graph in graphs(ALONE):
        assert graph["assembled"] and not graph["scattered"]
        assert not any(spilled for kernel in graph["assembled"].values() for _, spilled, _ in kernel)


def test_the_backward_moves_fewer_bytes_than_with_8_bits() -> None:
    (_, ours), (_, eight) = graphs(ALONE), graphs(STORAGE)
    assert ours["num_bytes"] < eight["num_bytes"]
