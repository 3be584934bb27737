"""Copies and pickles of compressed optimizers: they train on as the original, and their state dicts are plain."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fp8compile
from fp8compile.optim.encoded_tensor import EncodedTensor
from fp8compile.optim.overrides import override
from tests.support.checkpoints import raw, through_a_file, train

COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda pair: pickle.loads(pickle.dumps(pair)),
    "torch.save": lambda pair: saved(pair),
}


def saved(pair: Any) -> Any:
    file = io.BytesIO()
    torch.save(pair, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def compressed(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """An embedding, known by its module; a weight by its name; one by a mark; one by its group; a small bias."""
    torch.manual_seed(0)
    net = nn.ModuleDict({"words": nn.Embedding(64, 128), **{name: nn.Linear(128, 64) for name in "abc"}})
    override(net["b"], state_format="int8_companded")
    groups = [{"params": [p for name, p in net.named_parameters() if not name.startswith("c")]}]
    groups.append({"params": [*net["c"].parameters()], "state_format": "dynamic_tree"})  # type: ignore[dict-item]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    fp8compile.compress(optimizer, model=net, overrides={"a.weight": "4bit"})
    train(net, optimizer, steps)
    return net, optimizer


def formats(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    found = {name: optimizer.state[p]["exp_avg"] for name, p in net.named_parameters()}
    return {name: m.format if isinstance(m, EncodedTensor) else "fp32" for name, m in found.items()}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_copy_trains_on_as_the_original(how: str, steps: int) -> None:
    net, optimizer = compressed(steps)
    other, twin = COPIES[how]((net, optimizer))
    assert type(twin) is torch.optim.AdamW
    assert {id(p) for group in twin.param_groups for p in group["params"]} == {id(p) for p in other.parameters()}
    assert raw(through_a_file(twin.state_dict())) == raw(optimizer.state_dict())
    assert formats(other, twin) == formats(net, optimizer)
    assert len({*formats(net, optimizer).values()}) == 4
    for each in ((net, optimizer), (other, twin)):
        train(*each, 2, seed=2)
    assert raw(other.state_dict()) == raw(net.state_dict())
    assert raw(twin.state_dict()) == raw(optimizer.state_dict())


def test_a_copy_loads_a_state_dict() -> None:
    net, optimizer = compressed(2)
    other, twin = copy.deepcopy((net, optimizer))
    train(net, optimizer, 2, seed=2)
    other.load_state_dict(net.state_dict())
    twin.load_state_dict(through_a_file(optimizer.state_dict()))
    for each in ((net, optimizer), (other, twin)):
        train(*each, 1, seed=3)
    assert raw(twin.state_dict()) == raw(optimizer.state_dict())
    assert raw(other.state_dict()) == raw(net.state_dict())


def test_a_copy_of_a_copy_and_of_what_was_decompressed() -> None:
    net, optimizer = compressed(1)
    _, twin = copy.deepcopy(copy.deepcopy((net, optimizer)))
    assert raw(twin.state_dict()) == raw(optimizer.state_dict())
    _, plain = copy.deepcopy((net, fp8compile.decompress(optimizer)))
    assert {t.dtype for state in plain.state_dict()["state"].values() for t in state.values()} == {torch.float32}


def test_no_reference_keeps_an_optimizer_alive() -> None:
    _, optimizer = compressed(0)
    gc.collect()
    gone = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert gone() is None
    finally:
        gc.enable()
