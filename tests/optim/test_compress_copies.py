"""Copies and pickles of compressed optimizers train on as the original; decompress gives back what was there before."""

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
from torch import Tensor, nn
from torch.optim import lr_scheduler

import fp8compile
from fp8compile import optim
from fp8compile.optim.overrides import override
from tests.support.checkpoints import raw, through_a_file, train
from tests.support.compressing import assert_same_way, compressed, of_torch, parameters, values, with_gradients

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


def model_and_optimizer(steps: int, name: str = "AdamW") -> tuple[nn.Module, Any]:
    """An embedding, known by its module; a weight by its name; one by a mark; one by its group; a small bias."""
    torch.manual_seed(0)
    net = nn.ModuleDict({"words": nn.Embedding(64, 128), **{name: nn.Linear(128, 64) for name in "abc"}})
    override(net["b"], state_format="int8_companded")
    groups: list[dict[str, Any]] = [{"params": [p for n, p in net.named_parameters() if not n.startswith("c")]}]
    groups.append({"params": [*net["c"].parameters()], "state_format": "dynamic_tree"})
    optimizer = getattr(torch.optim, name)(groups, lr=1e-2)
    fp8compile.optim.compress(optimizer, model=net, overrides={"a.weight": "4bit"}, seed=3, compiled=False)
    train(net, optimizer, steps)
    return net, optimizer


def keys(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {name: [*optimizer.state[p]] for name, p in net.named_parameters()}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize(("name", "steps"), [("AdamW", 0), ("AdamW", 2), ("NAdam", 2)])
def test_a_copy_trains_on_as_the_original(how: str, name: str, steps: int) -> None:
    net, optimizer = model_and_optimizer(steps, name)
    other, twin = COPIES[how]((net, optimizer))
    assert type(twin) is type(optimizer) and (twin.seed, twin.compiled) == (3, False)
    assert {id(p) for group in twin.param_groups for p in group["params"]} == {id(p) for p in other.parameters()}
    assert raw(through_a_file(twin.state_dict())) == raw(optimizer.state_dict())
    for model, of_model in ((net, optimizer), (other, twin)):
        train(model, of_model, 2, seed=2)
    assert keys(other, twin) == keys(net, optimizer)
    ways = {
        key.split(".")[1] for found in keys(net, optimizer).values() for key in found if key.startswith("exp_avg.")
    }
    assert ways == {"fp32", "dynamic4", "int8_companded", "dynamic_tree"}
    assert raw(other.state_dict()) == raw(net.state_dict())
    assert raw(twin.state_dict()) == raw(optimizer.state_dict())


def test_a_copy_loads_a_state_dict() -> None:
    net, optimizer = model_and_optimizer(2)
    other, twin = copy.deepcopy((net, optimizer))
    train(net, optimizer, 2, seed=2)
    other.load_state_dict(net.state_dict())
    twin.load_state_dict(through_a_file(optimizer.state_dict()))
    for model, of_model in ((net, optimizer), (other, twin)):
        train(model, of_model, 1, seed=3)
    assert raw(twin.state_dict()) == raw(optimizer.state_dict())
    assert raw(other.state_dict()) == raw(net.state_dict())


def test_a_copy_of_a_copy_and_of_what_was_decompressed() -> None:
    net, optimizer = model_and_optimizer(1)
    _, twin = copy.deepcopy(copy.deepcopy((net, optimizer)))
    assert raw(twin.state_dict()) == raw(optimizer.state_dict())
    assert type(fp8compile.optim.decompress(twin)) is torch.optim.AdamW
    _, plain = copy.deepcopy((net, fp8compile.optim.decompress(optimizer)))
    assert type(plain) is torch.optim.AdamW
    assert {t.dtype for state in plain.state_dict()["state"].values() for t in state.values()} == {torch.float32}


def test_nothing_keeps_an_optimizer_alive() -> None:
    _, optimizer = model_and_optimizer(1)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {}),
    ("NAdam", {}),
    ("ASGD", {}),
    ("SGD", {"momentum": 0.9, "lr": torch.tensor(0.1)}),
    ("SGD", {}),
    ("Rprop", {}),
]


def described(state: dict[str, Any]) -> dict[str, Any]:
    """What a state is like, in its order."""
    return {name: (t.dtype, t.shape, t.device) if isinstance(t, Tensor) else type(t) for name, t in state.items()}


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(("name", "options"), KINDS)
def test_decompress_gives_back_what_was_there(name: str, options: dict[str, Any], steps: int) -> None:
    """The class, attributes, options in their order, and plain states; only codes leave a trace, in the values of states."""
    (theirs, plain), (ours, optimizer) = (of_torch(name, **copy.deepcopy(options)) for _ in range(2))
    kind, attributes = type(optimizer), {*vars(optimizer)}
    options_before = [[*each] for each in (optimizer.defaults, *optimizer.param_groups)]
    for step in range(steps):
        with_gradients(step, ours, theirs)
        optimizer.step()
        plain.step()
    fp8compile.optim.compress(optimizer, compiled=False)
    for step in range(steps, 4):
        with_gradients(step, ours, theirs)
        optimizer.step()
        plain.step()
    decoded = optimizer.export_fp32_state_dict()["state"]  # type: ignore[attr-defined]
    assert fp8compile.optim.decompress(optimizer) is optimizer and fp8compile.optim.decompress(optimizer) is optimizer
    assert type(optimizer) is kind and {*vars(optimizer)} == attributes
    assert [[*each] for each in (optimizer.defaults, *optimizer.param_groups)] == options_before
    for index, (p, q) in enumerate(zip(ours, theirs, strict=True)):
        assert described(optimizer.state[p]) == described(plain.state[q])
        assert raw(optimizer.state[p]) == raw({key: decoded[index][key] for key in optimizer.state[p]})
    before = values(ours)
    with_gradients(4, ours)
    optimizer.step()
    assert not any(map(torch.equal, ours, before))


@pytest.mark.parametrize("foreach", [None, True, False])
def test_decompressed_it_runs_as_it_was_made_to(foreach: bool | None) -> None:
    """With foreach=False torch.optim would go from parameter to parameter, on a GPU too."""
    _, optimizer = of_torch("AdamW", foreach=foreach)
    defaults, groups = dict(optimizer.defaults), [dict(group) for group in optimizer.param_groups]
    fp8compile.optim.decompress(fp8compile.optim.compress(optimizer, compiled=False))
    assert optimizer.defaults == defaults and optimizer.param_groups == groups


def test_compressed_for_a_while_it_goes_the_same_way() -> None:
    (theirs, plain), (ours, optimizer) = of_torch("NAdam"), of_torch("NAdam")
    before = values(ours)
    for step in range(9):
        if step == 3:
            fp8compile.optim.compress(optimizer, "fp32", compiled=False)
        if step == 6:
            fp8compile.optim.decompress(optimizer)
        with_gradients(step, ours, theirs)
        optimizer.step()
        plain.step()
    assert_same_way(ours, theirs, before, 9)


@pytest.mark.parametrize("master", ["none", "split", "fp32", "fp16_scaled"])
def test_what_is_decompressed_of_16_bits_trains_on(master: str) -> None:
    """torch.optim has states in the dtype of parameters."""
    theirs, ours = (parameters(dtype=torch.bfloat16) for _ in range(2))
    plain, optimizer = (torch.optim.AdamW(ps) for ps in (theirs, ours))
    fp8compile.optim.compress(optimizer, master=master, compiled=False)
    for each in (optimizer, plain):
        with_gradients(0, ours, theirs)
        each.step()
    fp8compile.optim.decompress(optimizer)
    assert [described(optimizer.state[p]) for p in ours] == [described(plain.state[p]) for p in theirs]
    with_gradients(1, ours)
    optimizer.step()
    assert all(p.isfinite().all() for p in ours)


@pytest.mark.parametrize("master", ["none", "split", "fp16_scaled"])
def test_compressed_again_in_the_same_way_all_bits_stay(master: str) -> None:
    """Of states and of what is kept beside 16-bit parameters."""
    ours = parameters(dtype=torch.bfloat16)
    optimizer = fp8compile.optim.compress(torch.optim.AdamW(ours), master=master, compiled=False)
    for step in range(2):
        with_gradients(step, ours)
        optimizer.step()
    before = raw(optimizer.state_dict())
    assert raw(fp8compile.optim.compress(optimizer, master=master, compiled=False).state_dict()) == before


@pytest.mark.parametrize("is_compressed", [True, False])
def test_a_schedule_goes_along_with_compress_and_decompress(is_compressed: bool) -> None:
    """It has put itself around the step; what it is around changes, and it counts on."""
    ps, optimizer = of_torch("SGD", lr=1.0)
    schedule = lr_scheduler.StepLR(optimizer, 1, 0.5)
    fp8compile.optim.compress(optimizer, compiled=False)
    if not is_compressed:
        fp8compile.optim.decompress(optimizer)
    for step in range(3):
        before = values(ps)
        with_gradients(step, ps)
        optimizer.step()
        schedule.step()
        rate, grad = 0.5**step, ps[0].grad
        assert grad is not None
        torch.testing.assert_close(before[0] - ps[0], rate * grad, rtol=0, atol=2.0**-22 * (1 + 5 * rate))
    assert schedule.get_last_lr() == [0.125] and isinstance(optimizer, optim.EncodedOptimizer) == is_compressed


def test_what_is_no_compressed_optimizer_is_left_as_it_is() -> None:
    for optimizer in (of_torch("AdamW")[1], optim.AdamW(parameters())):
        kind, names = type(optimizer), {*vars(optimizer)}
        assert fp8compile.optim.decompress(optimizer) is optimizer
        assert type(optimizer) is kind and {*vars(optimizer)} == names
    assert isinstance(compressed("AdamW")[1], torch.optim.AdamW)
