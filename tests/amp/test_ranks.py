"""Several ranks, with different data and different numbers of micro-batches: one histogram, one decision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fp8compile import optim
from fp8compile._distributed import local_part
from fp8compile.amp import LossScaler, accumulate, watch
from tests.support.amp_models import batch, counted, grown, loss_of, net, spoil
from tests.support.ranks import on_ranks

WORLD = 2


def uneven(rank: int) -> list[torch.Tensor]:
    """Rank 0 has one micro-batch of 3 rows, rank 1 three of 7."""
    return [batch(10 * rank + i, rows=3 + 4 * rank) for i in range(1 + 2 * rank)]


def two_bins_of(ranks: list[int], scale: float) -> tuple[float, float]:
    """h1 and h2 of parameters' gradients, by autograd.grad and numpy, over the data of these ranks."""
    model, h1, h2 = net(), 0.0, 0.0
    for rank in ranks:
        for x in uneven(rank):
            gradients = torch.autograd.grad(loss_of(model, x) * scale, list(model.parameters()))
            small, large, inf, nan, *_ = counted(gradients)
            h1, h2 = h1 + small, h2 + large + inf + nan
    return h1, h2


def count_on_ranks(scale: float) -> dict[str, Any]:
    model = net()
    seen = watch(model, kinds=("weight",))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = grown(LossScaler(), scale)
    for x in uneven(dist.get_rank()):
        scaler.scale(loss_of(model, x)).backward()
    scaler.step(optimizer)
    sums = []
    policy = scaler._policy
    scaler._policy = lambda now, seen: (sums.append(tuple(seen.numbers[:2].tolist())), policy(now, seen))[1]  # type: ignore[assignment]
    scaler.update()
    own = [n for row, n in zip(seen.rows, seen.history[-1][1].tolist(), strict=True) if row.direction == "backward"]
    return {"sums": sums[0], "scale": scaler.get_scale(), "rows": [sum(n[i] for n in own) for i in range(4)]}


@pytest.mark.parametrize("scale", [2.0, 2.0**16])
def test_counts_are_summed_over_uneven_ranks(scale: float) -> None:
    results = on_ranks(WORLD, count_on_ranks, scale)
    for rank, result in enumerate(results):
        small, large, inf, nan = result["rows"]
        assert (small, large + inf + nan) == two_bins_of([rank], scale)  # what a rank saw stays its own
        assert result["sums"] == two_bins_of([0, 1], scale)
        assert result["scale"] == (scale * 2 if result["sums"][1] == 0 else scale / 2)
    assert (results[0]["sums"][1] > 0) == (scale > 2)


def decide_on_ranks(mode: str) -> dict[str, Any]:
    """A NaN, then an inf, on rank 1 alone."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    interval = {"histogram": {"growth_interval": 1}, "dynamic": {"growth_interval": 100}, "static": {}}[mode]
    scaler = grown(LossScaler(mode, **interval), 64.0)
    poison = (spoil(torch.nan, [1]), spoil(torch.inf, [3]))
    before = None
    moved = []
    for i in range(5):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, batch(i + 7 * dist.get_rank()))).backward()
        if dist.get_rank() == 1:
            for each in poison:
                each(i, model)
        before = model[0].weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        moved.append(not torch.equal(before, model[0].weight))
    return {"history": scaler.history, "moved": moved, "skipped": scaler.skipped}


@pytest.mark.parametrize("mode", ["histogram", "dynamic", "static"])
def test_all_ranks_take_one_decision(mode: str) -> None:
    first, second = on_ranks(WORLD, decide_on_ranks, mode)
    assert first == second
    skipped = [1] if mode == "histogram" else [1, 3]  # where an inf is clipped
    assert [i for i, moved in enumerate(first["moved"]) if not moved] == skipped and first["skipped"] == len(skipped)
    scales = [scale for _, scale in first["history"]]
    assert scales == {"histogram": [128, 64, 128, 64, 128], "dynamic": [64, 32, 32, 16, 16], "static": [64] * 5}[mode]


def train_ddp(steps: int) -> dict[str, Any]:
    model = DistributedDataParallel(net())
    watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = LossScaler()
    for i in range(steps):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, batch(2 * i + dist.get_rank(), rows=2 + 3 * dist.get_rank()))).backward()
        scaler.step(optimizer)
        scaler.update()
    return {
        "history": scaler.history,
        "weights": [p.tolist() for p in model.parameters()],
        "n": len(scaler.observations),
    }


def train_fsdp(steps: int) -> dict[str, Any]:
    """FP16 shards, whose gradients autograd never meets: they are counted where they lie."""
    model = net()
    fully_shard(model)
    watch(model, kinds=("weight",))
    optimizer = optim.AdamW(model, lr=1e-3, compiled=False)
    scaler = LossScaler(kinds=("weight",))
    sums = []
    policy = scaler._policy
    scaler._policy = lambda now, seen: (sums.append(seen.numbers[:2].sum().item()), policy(now, seen))[1]  # type: ignore[assignment]
    for i in range(steps):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, batch(2 * i + dist.get_rank()))).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        dtypes = {local_part(p.grad).dtype for p in model.parameters()}  # type: ignore[arg-type]
        scaler.step(optimizer)
        scaler.update()
    return {"history": scaler.history, "sums": sums, "dtypes": dtypes}


def test_distributed_data_parallel() -> None:
    first, second = on_ranks(WORLD, train_ddp, 8)
    assert first == second and first["n"] == 1
    assert [scale for _, scale in first["history"]] == [2.0**k for k in range(1, 9)]


def test_fully_shard() -> None:
    first, second = on_ranks(WORLD, train_fsdp, 6)
    assert first == second
    assert [scale for _, scale in first["history"]] == [2.0**k for k in range(1, 7)]
    assert first["sums"] == [sum(p.numel() for p in net().parameters())] * 6  # each element once, on one of the ranks
    assert first["dtypes"] == {torch.float32}


def mean_on_ranks(dtype: torch.dtype, wrapped: bool) -> tuple[list[Any], list[Any], list[Any]]:
    """The accumulated gradient of uneven ranks; the float64 mean over all micro-batches, and the largest of them."""
    model = net()
    ranked = DistributedDataParallel(model) if wrapped else model
    acc = accumulate(ranked, dtype=dtype)
    for x in uneven(dist.get_rank()):
        if wrapped:
            with ranked.no_sync():  # type: ignore[operator]
                loss_of(ranked, x).backward()
        else:
            loss_of(ranked, x).backward()
    acc.finish()
    everything = [
        torch.autograd.grad(loss_of(model, x), list(model.parameters()))
        for rank in range(WORLD)
        for x in uneven(rank)
    ]
    stacked = [torch.stack([g.double() for g in each]) for each in zip(*everything, strict=True)]
    means, largest = [each.mean(0).tolist() for each in stacked], [each.abs().amax(0).tolist() for each in stacked]
    return [p.grad.double().tolist() for p in model.parameters()], means, largest  # type: ignore[union-attr]


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "DDP"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_mean_over_uneven_ranks(dtype: torch.dtype, wrapped: bool) -> None:
    (first, means, largest), (second, _, _) = on_ranks(WORLD, mean_on_ranks, dtype, wrapped)
    assert first == second  # replicas stay alike
    for a, b, most in zip(*(map(torch.tensor, each) for each in (first, means, largest)), strict=True):
        # FP32: to nearest once. 16 bits: at most three roundings on a rank and one of the sum, each within a place of what
        # is never more than the largest of the gradients
        bound = 0.501 * place(b) if dtype == torch.float32 else 4 * place(most)
        assert ((a - b).abs() <= bound).all()


def place(x: torch.Tensor) -> torch.Tensor:
    """FP16's last place at x."""
    return 2.0 ** (torch.frexp(x.abs().clamp_min(2.0**-14)).exponent - 11.0)


def synced_ddp() -> str:
    model = DistributedDataParallel(net())
    accumulate(model)
    try:
        loss_of(model, batch(0)).backward()
    except RuntimeError as error:
        return str(error)
    return ""


def mean_of_shards() -> list[float]:
    model = net()
    fully_shard(model)
    acc = accumulate(model)
    for i in range(3):
        loss_of(model, batch(10 * dist.get_rank() + i)).backward()
    acc.finish()
    return [p.grad.full_tensor().double().sum().item() for p in model.parameters()]  # type: ignore[union-attr]


def test_ddp_that_averages_itself_is_refused_and_shards_are_not() -> None:
    assert all("no_sync" in message for message in on_ranks(WORLD, synced_ddp))
    first, second = on_ranks(WORLD, mean_of_shards)
    model = net()
    xs = [batch(10 * rank + i) for rank in range(WORLD) for i in range(3)]
    gradients = [torch.autograd.grad(loss_of(model, x), list(model.parameters())) for x in xs]
    expected = [torch.stack([g.double() for g in each]).mean(0).sum().item() for each in zip(*gradients, strict=True)]
    assert first == second == pytest.approx(expected, rel=1e-2, abs=1e-3)
