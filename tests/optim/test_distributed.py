"""Sharded and replicated parameters: a rank encodes its rows as the whole would; checkpoints go to any number of ranks.

The whole, trained in the same process on the same gradients, is what shards are held against, bit for bit.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from fp8compile import optim
from fp8compile._distributed import first_element, local_part
from tests.support.ranks import on_ranks
from tests.support.sharded import check_parts, mine, model_of, placed, reason_of, same_bits, train

# Checkpoints go from any number of ranks to any


# What shards do not own, stays whole or is refused


def columns() -> None:
    net = model_of(weight=placed(Shard(1)))
    optimizer, marked = (optim.AdamW(net, compiled=False, overrides=o) for o in ({}, {"*": "dynamic_tree"}))
    for each in (optimizer, marked):
        assert reason_of(each) == "sharded along dim 1: only along dim 0 a shard owns whole groups"
    plain = model_of(weight=placed(Shard(1)).full_tensor())
    encoded, fp32 = (optim.AdamW(plain, compiled=False, state_format=fmt) for fmt in ("e4m3_expanded", "fp32"))
    train(plain, encoded, range(2))
    fp32.load_state_dict(encoded.state_dict())
    optimizer.load_state_dict(encoded.state_dict())
    local_part(net.weight).copy_(mine(net.weight, plain.weight.detach()))
    check_parts(net, optimizer, (plain, fp32))
    train(plain, fp32, range(2, 3))
    train(net, optimizer, range(2, 3))
    check_parts(net, optimizer, (plain, fp32))


def test_shards_of_columns_keep_fp32() -> None:
    on_ranks(2, columns)


def reasons() -> dict[str, str | None]:
    rank1 = ("dynamic4", "rank1_linear4")
    found = {
        "rows": optim.AdamW([placed(Shard(0))]),
        "one dimension": optim.AdamW([placed(Shard(0), (5000,))]),
        "rank1": optim.AdamW([placed(Shard(0))], state_format=rank1),
        "rank1, not cut": optim.AdamW([placed(Replicate())], state_format=rank1),
    }
    return {name: reason_of(optimizer) for name, optimizer in found.items()}


@pytest.mark.parametrize("world", [1, 2])
def test_reasons_do_not_depend_on_the_number_of_ranks(world: int) -> None:
    for found in on_ranks(world, reasons):
        assert found == {
            "rank1": "sharded, and rank1_linear4 has metadata that all rows share",
            "one dimension": "one dimension, sharded: a shard would cut its groups",
            "rows": None,
            "rank1, not cut": None,
        }


def whole_tensor_updates() -> None:
    cut = dist.get_world_size() > 1
    for kind in (optim.LAMB, optim.Muon):
        net = model_of(weight=placed(Shard(0)))
        optimizer = kind(net.named_parameters(), compiled=False)
        before = net.weight.to_local().clone()
        if cut:
            with pytest.raises(ValueError, match=f"weight is sharded, and {kind.__name__} works on whole parameters"):
                train(net, optimizer, range(1))
            with pytest.raises(ValueError, match="weight is sharded"):
                optimizer.step_function(net.weight)
            assert torch.equal(net.weight.to_local(), before) and not optimizer.state[net.weight]
        else:
            train(net, optimizer, range(1))
        together = model_of(weight=placed(Replicate()))
        alone = model_of(weight=placed(Replicate()).full_tensor())
        both = [(each, kind(each, compiled=False)) for each in (together, alone)]
        for each in both:
            train(*each, range(2))
        check_parts(*both[0], both[1])


@pytest.mark.parametrize("world", [1, 2])
def test_updates_of_whole_tensors_take_no_shards(world: int) -> None:
    on_ranks(world, whole_tensor_updates)


# Other ways of cutting and averaging


def replicas() -> None:
    """DTensors that every rank has all of; 1-D ones are encoded. A gradient may be a sum that is not yet taken."""
    values = {"long": placed(Replicate(), (5000,)), "weight": placed(Replicate())}
    net, alone = model_of(**values), model_of(**{name: value.full_tensor() for name, value in values.items()})
    both = [(each, optim.AdamW(each, compiled=False)) for each in (net, alone)]
    for each in both:
        train(*each, range(1))
    assert "exp_avg.e4m3_expanded.amax" in both[0][1].state[net.long]
    check_parts(*both[0], both[1])
    for p, q in zip(net.parameters(), alone.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        share = local_part(p.grad).round() * (1 if dist.get_rank() else 2)
        p.grad = DTensor.from_local(share, p.device_mesh, [Partial()], run_check=False)
        q.grad = q.grad.round() * 3
    for _, optimizer in both:
        optimizer.step()
    check_parts(*both[0], both[1])


def test_replicas() -> None:
    on_ranks(2, replicas)


def two_ways() -> None:
    """Tensor parallelism along dim 0, and fully_shard within it: rows of rows."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for dtype in (torch.float32, torch.bfloat16):
        whole = torch.randn(8, 1030, generator=torch.Generator().manual_seed(0)).to(dtype)
        net = model_of(weight=distribute_tensor(whole, mesh["tp"], [Shard(0)], src_data_rank=None))
        alone = model_of(weight=whole.clone())
        fully_shard(net, mesh=mesh["dp"])
        first = {(0, 0): 0, (1, 0): 2, (0, 1): 4, (1, 1): 6}[tuple(mesh.get_coordinate())]  # tp first, then dp
        assert first_element(net.weight) == first * 1030
        rows = slice(first, first + 2)
        optimizers = [optim.AdamW(each, compiled=False) for each in (net, alone)]
        for step in range(2):
            grad = torch.randn(8, 1030, generator=torch.Generator().manual_seed(step)).to(dtype)
            p = net.weight
            p.grad = DTensor.from_local(
                grad[rows], p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
            )
            alone.weight.grad = grad
            for each in optimizers:
                each.step()
        same_bits(local_part(p), alone.weight.detach()[rows], "parameter")
        for key, value in optimizers[1].state[alone.weight].items():
            found = optimizers[0].state[p][key]
            same_bits(local_part(found), value[rows] if value.dim() else value, key)


def test_two_dimensional_meshes() -> None:
    on_ranks(4, two_ways)


def numbers() -> list[tuple[int, int]]:
    """Each rank's numbers of elements, first and beyond the last."""
    found = []
    for placements in ([Shard(0), Replicate()], [Shard(0), Shard(1)], [Shard(1), Shard(2)], [Replicate(), Shard(2)]):
        p = distribute_tensor(torch.zeros(5, 6, 7), init_device_mesh("cpu", (2, 2)), placements, src_data_rank=None)
        first = first_element(p)
        found.append((first, first + p.to_local().numel()))
    return found


def test_random_numbers_of_different_elements_differ() -> None:
    """Streams are numbered by element: two ranks' numbers are the same where their elements are, and else disjoint."""
    by_rank = on_ranks(4, numbers)
    coordinates = [*itertools.product(range(2), range(2))]
    for case, dims in enumerate([(0,), (0, 1), (0, 1), (1,)]):  # the mesh dimensions that tell shards apart
        for (one, a), (other, b) in itertools.combinations(zip(coordinates, by_rank, strict=True), 2):
            alike = all(one[dim] == other[dim] for dim in dims)
            (first, last), (start, end) = a[case], b[case]
            assert (first, last) == (start, end) if alike else last <= start or end <= first, (case, one, other)


def integers(rank: int, step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A rank's inputs and weights of outputs: -1, 0 and 1, so that sums over batch and ranks are exact in any order."""
    random = torch.Generator().manual_seed(10 * step + rank)
    x, y = (torch.randint(-1, 2, (4, n), generator=random).to(dtype) for n in (130, 67))
    return x, y


def averaged_gradients(kind: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        alone = nn.Linear(130, 67).to(dtype)
        torch.manual_seed(0)
        model: nn.Module = nn.Linear(130, 67).to(dtype)
        if kind == "ddp":
            shared: Any = nn.parallel.DistributedDataParallel(model)
        else:
            shared = fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        optimizers = [optim.AdamW(each, lr=1e-2, compiled=False) for each in (model, alone)]
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            x, y = integers(dist.get_rank(), step, dtype)
            (shared(x) * y).sum().backward()
            parts = [integers(rank, step, dtype) for rank in range(2)]
            x, y = (torch.cat(each) for each in zip(*parts, strict=True))
            ((alone(x) * y).sum() / 2).backward()
            for optimizer in optimizers:
                optimizer.step()
        if kind == "ddp":
            states = [optimizer.state_dict()["state"] for optimizer in optimizers]
            for p, q in zip(model.parameters(), alone.parameters(), strict=True):
                same_bits(p.detach(), q.detach(), "parameter")
            for i, key in ((i, key) for i, state in states[1].items() for key in state):
                same_bits(states[0][i][key], states[1][i][key], key)
        else:
            check_parts(model, optimizers[0], (alone, optimizers[1]))


@pytest.mark.parametrize("kind", ["ddp", "fully_shard"])
def test_two_ranks_are_one_process_with_the_whole_batch(kind: str) -> None:
    """The gradients are exact sums of integers, so that nothing depends on the order of a sum: not a bit differs."""
    on_ranks(2, averaged_gradients, kind)
