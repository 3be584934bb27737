"""Sharded and replicated parameters: a rank encodes its rows as the whole would; checkpoints go to any number of ranks.

The whole, trained in the same process on the same gradients, is what shards are held against, bit for bit.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from fp8compile import optim
from fp8compile._distributed import first_element, local_part
from tests.support.ranks import on_ranks

# Rows that neither 2 nor 3 divides, short groups at their ends, rows that are several dimensions, fewer rows than ranks.
SHAPES = {"weight": (67, 130), "conv": (10, 64, 3, 3), "wide": (2, 4096), "long": (5000,), "bias": (67,)}
WHOLE_IN_SHARDS = {"long": "fp32"}  # one dimension: a shard would cut its groups


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=random).to(dtype)))


@dataclass(frozen=True)
class Case:
    """How an optimizer is built, and how its state dict is asked for."""

    kind: type[optim.EncodedOptimizer] = optim.AdamW
    state_format: Any = "e4m3_expanded"
    dtype: torch.dtype = torch.float32
    master: str = "none"
    flat: bool = False

    def of(self, net: nn.Module) -> optim.EncodedOptimizer:
        options: dict[str, Any] = {"momentum": 0.9} if self.kind is optim.SGD else {}
        options |= {"state_format": self.state_format, "master": self.master, "overrides": WHOLE_IN_SHARDS}
        return self.kind(net, lr=1e-2, compiled=False, **options)  # type: ignore[call-arg]

    def sharded(self, *, seed: int = 0) -> tuple[nn.Module, optim.EncodedOptimizer]:
        net = Net(self.dtype, seed)
        fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        return net, self.of(net)

    def whole(self, steps: int) -> tuple[nn.Module, optim.EncodedOptimizer]:
        net = Net(self.dtype)
        optimizer = self.of(net)
        train(net, optimizer, range(steps))
        return net, optimizer


CASES = {
    "AdamW": Case(),
    "flat": Case(flat=True),
    "stochastic rounding": Case(dtype=torch.bfloat16),
    "split": Case(dtype=torch.bfloat16, master="split", flat=True),
    "fp32 master": Case(dtype=torch.float16, master="fp32"),
    "mixed formats": Case(state_format=("dynamic_tree", "int8_companded")),
    "4bit": Case(state_format="4bit"),
    "SGD": Case(optim.SGD, "e5m2", torch.float16),
    "Lion": Case(optim.Lion, "bf16"),
}


def mine(p: Tensor, whole: Tensor) -> Tensor:
    """This rank's part of a tensor that is sharded as ``p`` is; torch's cut, not ours."""
    if not isinstance(p, DTensor) or whole.dim() == 0:
        return whole
    raw = whole.view(torch.uint8) if whole.element_size() == 1 else whole
    part = distribute_tensor(raw, p.device_mesh, p.placements, src_data_rank=None).to_local()
    return part.view(whole.dtype)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Steps on gradients that depend on the number of the step alone."""
    for step in steps:
        random = torch.Generator().manual_seed(100 + step)
        for p in net.parameters():
            grad = torch.randn(p.shape, generator=random).to(p.dtype)
            placed = isinstance(p, DTensor)
            p.grad = distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None) if placed else grad
        optimizer.step()


def check_parts(net: nn.Module, optimizer: Any, whole: tuple[nn.Module, Any], what: str = "") -> None:
    """Parameters and states here are this rank's parts of those of the whole, bit for bit."""
    for (name, p), q in zip(net.named_parameters(), whole[0].parameters(), strict=True):
        ours, theirs = optimizer.state[p], whole[1].state[q]
        assert ours.keys() == theirs.keys(), (what, name, ours.keys(), theirs.keys())
        for key, found, wanted in [("", p, q), *((key, ours[key], theirs[key]) for key in ours)]:
            assert isinstance(found, DTensor) == (key != "step"), (what, name, key)
            same_bits(local_part(found), mine(p, wanted.detach()), (what, name, key))
            assert found.shape == wanted.shape, (what, name, key)


def same_bits(found: Tensor, wanted: Tensor, what: Any) -> None:
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), (what, found, wanted)
    raw = (t.contiguous().reshape(-1).view(torch.uint8) for t in (found, wanted))
    assert torch.equal(*raw), what


# Checkpoints go from any number of ranks to any


def save(folder: Path) -> None:
    for name, case in CASES.items():
        net, optimizer = case.sharded()
        train(net, optimizer, range(3))
        check_parts(net, optimizer, case.whole(3), name)
        options = StateDictOptions(flatten_optimizer_state_dict=case.flat)
        states = get_optimizer_state_dict(net, optimizer, options=options)
        dcp.save({"model": get_model_state_dict(net), "states": states}, checkpoint_id=folder / name)


def load(folder: Path) -> None:
    for name, case in CASES.items():
        net, optimizer = case.sharded(seed=1)
        options = StateDictOptions(flatten_optimizer_state_dict=case.flat)
        saved = {
            "model": get_model_state_dict(net),
            "states": get_optimizer_state_dict(net, optimizer, options=options),
        }
        dcp.load(saved, checkpoint_id=folder / name)
        set_model_state_dict(net, saved["model"])
        set_optimizer_state_dict(net, optimizer, saved["states"], options=options)
        check_parts(net, optimizer, case.whole(3), name)
        train(net, optimizer, range(3, 5))
        check_parts(net, optimizer, case.whole(5), name)


def test_resharding(tmp_path: Path) -> None:
    on_ranks(2, save, tmp_path)
    on_ranks(1, load, tmp_path)
    on_ranks(3, load, tmp_path)


def save_as_it_is(folder: Path) -> None:
    net, optimizer = Case(dtype=torch.bfloat16).sharded()
    train(net, optimizer, range(3))
    dcp.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder)


def load_as_it_is(folder: Path) -> None:
    case = Case(dtype=torch.bfloat16)
    net, optimizer = case.sharded(seed=1)
    train(net, optimizer, range(1))  # so that there are states to load into
    optimizer.param_groups[0]["lr"] = 1.0
    model, states = net.state_dict(), optimizer.state_dict()
    dcp.load({"model": model, "optimizer": states}, checkpoint_id=folder)
    optimizer.load_state_dict(states)
    assert optimizer.param_groups[0]["lr"] == 1e-2
    check_parts(net, optimizer, case.whole(3))
    train(net, optimizer, range(3, 4))
    check_parts(net, optimizer, case.whole(4))


def test_resharding_what_state_dict_gives(tmp_path: Path) -> None:
    on_ranks(2, save_as_it_is, tmp_path)
    on_ranks(3, load_as_it_is, tmp_path)


def full_state_dicts(folder: Path) -> None:
    case = Case(dtype=torch.bfloat16, master="split")
    whole = case.whole(3)
    net, optimizer = case.sharded()
    train(net, optimizer, range(3))
    full = StateDictOptions(full_state_dict=True)
    saved = get_optimizer_state_dict(net, optimizer, options=full)
    if dist.get_rank() == 0:
        torch.save(saved, folder / "full.pt")
    net.zero_grad()  # or torch makes no states to load into
    for options in (full, StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)):
        other = case.of(net)
        known = {} if dist.get_rank() and options is not full else saved
        set_optimizer_state_dict(net, other, known, options=options)
        check_parts(net, other, whole)
    plain = case.of(net)
    plain.load_state_dict(whole[1].state_dict())  # whole tensors, of which each rank takes its part
    check_parts(net, plain, whole)


def test_full_state_dicts(tmp_path: Path) -> None:
    on_ranks(2, full_state_dicts, tmp_path)
    case = Case(dtype=torch.bfloat16, master="split")
    net, optimizer = case.whole(3)
    net.zero_grad()
    alone = case.of(net)
    full = StateDictOptions(full_state_dict=True)
    set_optimizer_state_dict(net, alone, torch.load(tmp_path / "full.pt", weights_only=True), options=full)
    check_plain(net, alone, optimizer)


def check_plain(net: nn.Module, found: Any, wanted: Any) -> None:
    for p in net.parameters():
        assert found.state[p].keys() == wanted.state[p].keys()
        for key, value in wanted.state[p].items():
            same_bits(found.state[p][key], value, key)


def other_formats() -> None:
    """States of torch and of another format, sharded and whole, come in as the whole's do, cut."""
    old, new = Case(state_format="dynamic_tree"), Case()
    net, theirs = old.sharded()
    train(net, theirs, range(2))
    whole_net, whole = old.whole(2)
    stock, whole_stock = torch.optim.AdamW(net.parameters()), torch.optim.AdamW(whole_net.parameters())
    for each, states in ((stock, theirs), (whole_stock, whole)):
        each.load_state_dict(states.export_fp32_state_dict())
    for ours, its in (
        (theirs.state_dict(), whole.state_dict()),
        (whole.state_dict(), whole.state_dict()),
        (stock.state_dict(), whole_stock.state_dict()),
        (whole_stock.state_dict(), whole_stock.state_dict()),
    ):
        here, there = new.of(net), new.of(whole_net)
        here.load_state_dict(ours)
        there.load_state_dict(its)
        check_parts(net, here, (whole_net, there))


def test_other_formats() -> None:
    on_ranks(2, other_formats)


def sharded_otherwise() -> None:
    net, optimizer = Case().sharded()
    train(net, optimizer, range(1))
    mesh, key = init_device_mesh("cpu", (2,)), "exp_avg.e4m3_expanded.amax"
    saved = optimizer.state_dict()
    saved["state"][1] = {**saved["state"][1], key: distribute_tensor(torch.zeros(10, 5), mesh, [Replicate()])}
    before = {p: dict(state) for p, state in optimizer.state.items()}
    with pytest.raises(ValueError, match=r"state of conv: exp_avg.e4m3_expanded.amax is sharded as .*Replicate"):
        optimizer.load_state_dict(saved)
    assert all(optimizer.state[p][name] is t for p, state in before.items() for name, t in state.items())
    plain = Case().of(Net())
    with pytest.raises(ValueError, match=r"state of weight: .* is sharded as .*not at all.*full_tensor"):
        plain.load_state_dict(optimizer.state_dict())
    assert not plain.state


def test_a_state_that_is_sharded_otherwise_is_refused() -> None:
    on_ranks(2, sharded_otherwise)


# What shards do not own, stays whole or is refused


def model_of(**parameters: Tensor) -> Any:
    net = nn.Module()
    for name, value in parameters.items():
        net.register_parameter(name, nn.Parameter(value))
    return net


def placed(placement: Any, shape: tuple[int, ...] = (66, 256)) -> Any:
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(whole, mesh, [placement], src_data_rank=None)


def reason_of(optimizer: optim.EncodedOptimizer) -> str | None:
    return optimizer.placement(optimizer.param_groups[0]["params"][0], optimizer.param_groups[0]).reason


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
