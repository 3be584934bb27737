"""Whose amax makes a scale: under DDP a weight's is the same on all ranks, an activation's is that of the rank's own rows;
in tensor parallelism a part has a scale of its own, which leaves the product before anything is summed over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch.nn.parallel import DistributedDataParallel

from fp8compile.compiler import inductor
from fp8compile.compiler.node_by_node import boxed
from fp8compile.fx.graph import ENCODING
from fp8compile.numerics import E4M3, Tensorwise
from tests.support.parallel import Net, Setup, loss_of
from tests.support.parallel_modes import cut_for_tensor_parallelism
from tests.support.ranks import on_ranks

EXACT = Setup(options={"saved": "off"})
LINEARS = [f"blocks.{block}.{name}.weight" for block in range(2) for name in ("up", "down")]


def seen_in(run: Callable[..., Any], shard: int) -> tuple[list[float], list[str]]:
    """Of one step, in order: the inverse scale of every operand of an FP8 matmul, and the name of every collective."""
    torch._dynamo.reset()
    seen: list[float] = []
    collectives: list[str] = []

    class Listening(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            if ENCODING in n.meta and value.dtype == torch.float32 and value.dim() == 0:
                seen.append(value.item())
            if str(n.target).startswith("_c10d_functional") and "wait" not in str(n.target):
                collectives.append(str(n.target).split(".")[1])
            return value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inductor, "run_the_graph", lambda gm, inputs, **kwargs: boxed(Listening(gm).run))
        x, labels = EXACT.batch(shard, 0)
        loss_of(run(x), labels).backward()
    return seen, collectives


def scales_of(run: Callable[..., Any], shard: int) -> list[float]:
    return seen_in(run, shard)[0]


def weights(net: Net, parts: int = 1) -> list[set[float]]:
    """The inverse scales of the linears' weights; for each part of them where they are cut as tensor parallelism does."""
    found: list[set[float]] = [set() for _ in range(parts)]
    for name in LINEARS:
        weight = net.get_parameter(name).detach()
        for part, own in zip(weight.chunk(parts, dim=int("down" in name)), found, strict=True):
            own.add(Tensorwise(E4M3).encode(part)[1].item())
    return found


def replicated() -> list[float]:
    model = EXACT.compiled(EXACT.net())
    return scales_of(DistributedDataParallel(model), dist.get_rank())


@pytest.mark.sweep
def test_replicas_share_the_scales_of_weights_and_nothing_else() -> None:
    found = on_ranks(2, replicated)
    model = EXACT.compiled(EXACT.net())
    assert found == [scales_of(model, shard) for shard in range(2)]
    (shared,) = weights(EXACT.net())
    assert len(shared) == 4 and {a for a, b in zip(*found, strict=True) if a == b} == shared


def cut() -> tuple[list[float], list[str]]:
    model = EXACT.net()
    cut_for_tensor_parallelism(model)
    return seen_in(EXACT.compiled(model), 0)


def test_a_part_of_a_weight_has_a_scale_of_its_own() -> None:
    ranks = on_ranks(2, cut)
    found = [set(scales) for scales, _ in ranks]
    own, (whole,) = weights(EXACT.net(), 2), weights(EXACT.net())
    for rank in range(2):
        assert own[rank] <= found[rank]
        assert not (own[1 - rank] - own[rank] - whole) & found[rank]
    assert [collectives for _, collectives in ranks] == [["all_reduce"] * 4] * 2, "none is made again in the backward"
    pieces = EXACT.compiled(EXACT.net(pieces=2))
    assert found[0] | found[1] == set(scales_of(pieces, 0))
