"""Lowered for an H100: what one more layer of a deep Llama moves, and that layers that are alike have the same kernels.

All figures: benchmarks/results/depth-sm90-lowered.json.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="triton, which compiles what Inductor generates, exists for Linux only")

from .layers import CONSERVATIVE
from .subprocesses import result_of

pytestmark = pytest.mark.sweep

# Units that one more layer moves, forward and backward; its kernels. Exact for fake_h100.WORKS_WITH.
FIGURES = {("llama 16k", CONSERVATIVE): ((25.82, 7), (29.51, 5))}


def one_more(case: str, pipeline: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = result_of("run_depth")["cases"][case][pipeline]
    return found


@pytest.mark.parametrize(("case", "pipeline"), FIGURES)
def test_what_one_more_layer_moves_and_launches(case: str, pipeline: str) -> None:
    measured = ((round(graph["units"], 2), graph["launches"]) for graph in one_more(case, pipeline))
    assert tuple(measured) == FIGURES[case, pipeline]


@pytest.mark.parametrize(("case", "pipeline"), FIGURES)
def test_layers_that_are_alike_have_the_same_kernels(case: str, pipeline: str) -> None:
    """Without ``store_residuals`` each norm of the forward adds up another number of matmuls' results."""
    forward, backward = (graph["kernels"] for graph in one_more(case, pipeline))
    assert forward[0] == forward[1]
    assert backward[1] <= backward[0] + 1, "one is of the layers between"
