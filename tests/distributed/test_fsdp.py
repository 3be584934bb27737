"""fully_shard, whole and per block, also computing in BF16: not a bit differs from one process that quantizes per shard."""

from __future__ import annotations

import pytest

from tests.support.parallel_modes import MODES, compared

NAMES = [name for name in MODES if name.startswith("FSDP2,")]


@pytest.mark.sweep
@pytest.mark.parametrize("name", NAMES)
def test_fully_shard(name: str) -> None:
    found = compared(name)
    assert found.losses and not found.parameters and not found.states
    assert found.replicas
    in_graphs = 12 if "per block" in name else 15  # the head, by itself, is compiled by nobody
    assert found.linears == 12 and found.of == in_graphs and found.as_alone
    assert {found.scales, found.counts, found.counts_alone} == ({True} if "FP16" in name else {None})
