"""DistributedDataParallel, compiled around and within: not a bit differs from one process that quantizes per shard."""

from __future__ import annotations

import pytest

from tests.support.parallel_modes import MODES, compared

IN_CI = ("DDP, compiled around",)
NAMES = [name for name in MODES if name.startswith("DDP")]


@pytest.mark.parametrize("name", [n if n in IN_CI else pytest.param(n, marks=pytest.mark.sweep) for n in NAMES])
def test_ddp(name: str) -> None:
    found = compared(name)
    assert found.losses and not found.parameters and not found.states
    assert found.replicas
    assert found.linears == 12 and found.of == 15 and found.as_alone
    assert {found.scales, found.counts, found.counts_alone} == ({True} if "FP16" in name else {None})
