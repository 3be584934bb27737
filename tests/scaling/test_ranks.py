"""Delayed scaling on two ranks: each has scales of its own, until they agree on the largest amaxes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fp8compile
from tests.support.measure import compiled
from tests.support.ranks import on_ranks

Told = tuple[dict[str, float], bool]


def trained() -> list[Told]:
    """After each of four steps the newest amaxes, and whether the next step measures; ranks agree in the last two."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    model = DistributedDataParallel(compiled(inner, emulate=True, saved="off", linear_scaling="delayed"))
    told = []
    for step in range(4):
        x = torch.randn(16 + 8 * rank, 32, generator=torch.Generator().manual_seed(10 * step + rank))
        x *= 1000 if (rank, step) == (0, 2) else 1  # rank 0 clips, so both are to measure
        model(x).square().mean().backward()
        state = fp8compile.scaling_state(inner)
        if step >= 2:
            state.all_reduce()
        (labels, each), *_ = state.graphs
        told.append((dict(zip(labels, each.amaxes[:, 0].tolist(), strict=True)), each.must_measure()))
    return told


def test_ranks_that_agree_have_the_same_scales_and_measure_together() -> None:
    zero, one = on_ranks(2, trained)
    for step in (0, 1):
        assert zero[step][0]["0.input"] != one[step][0]["0.input"], "each its own data"
        assert zero[step][0]["0.weight"] == one[step][0]["0.weight"], "replicated weights have equal scales anyway"
    for step in (2, 3):
        assert zero[step] == one[step]
    assert zero[2][1] and not zero[3][1]
    assert zero[2][0]["0.input"] > 1000
