"""Observation and CUDA graphs: Inductor would capture the graphs with the extra inputs as it does those without."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton, which compiles what Inductor generates, exists for Linux only")

from .subprocesses import result_of

pytestmark = pytest.mark.sweep

FORWARD, BACKWARD = ({"backward": backward, "mutated_inputs": []} for backward in (False, True))
EXTRA = 2  # statistics and limit


@pytest.mark.parametrize("recipe", ["off", "on", "all"])
def test_both_graphs_are_captured_whole(recipe: str) -> None:
    found = result_of("run_cudagraphs")["layer"][recipe]
    assert found["reasons"] == [] and found["captured"] == [FORWARD, BACKWARD]


def test_observed_graphs_have_the_extra_inputs() -> None:
    layer = result_of("run_cudagraphs")["layer"]
    assert layer["on"]["inputs"][0] == layer["all"]["inputs"][0] == layer["off"]["inputs"][0] + EXTRA


def test_what_cannot_be_captured_is_not() -> None:
    found = result_of("run_cudagraphs")["cannot"]
    assert found["captured"] == [] and any("incompatible op" in reason for reason in found["reasons"])
