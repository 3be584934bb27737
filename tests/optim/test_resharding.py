"""States saved by some ranks and loaded by others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from tests.support.ranks import on_ranks
from tests.support.sharded import CASES, Case, Net, check_parts, same_bits, train


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
