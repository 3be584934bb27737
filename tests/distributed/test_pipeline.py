"""Stages of a pipeline, compiled: not a bit differs from the same stages one after the other in one process."""

from __future__ import annotations

import pytest

from tests.support.parallel_modes import MODES, compared

NAMES = [name for name in MODES if name.startswith("pipeline")]


@pytest.mark.sweep
@pytest.mark.parametrize("name", NAMES)
def test_stages(name: str) -> None:
    found = compared(name)
    assert found.losses and not found.parameters and not found.states
    assert found.linears == 12 and found.of == 15
    assert {found.scales, found.counts} == ({True} if "FP16" in name else {None})
