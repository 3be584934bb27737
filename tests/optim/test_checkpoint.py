"""State dicts: what goes out comes back bit for bit, torch.optim's comes in, and what does not fit changes nothing."""

from __future__ import annotations

import copy
import io
import json
import math
import pickle
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from fp8compile import optim
from fp8compile.numerics.states.registry import STATE_FORMATS
from fp8compile.numerics.states.split_weights import joined
from fp8compile.optim.checkpoint import VERSION, VERSION_KEY
from fp8compile.optim.compress import compress
from fp8compile.optim.overrides import override

SHAPES = {"weight": (67, 130), "conv": (10, 64, 3, 3), "long": (5000,), "bias": (67,), "scale": ()}
ENCODED = ("weight", "conv", "long")  # at least 4096 elements
KINDS: dict[str, tuple[type[optim.EncodedOptimizer], dict[str, Any]]] = {
    "AdamW": (optim.AdamW, {}),
    "Adam": (optim.Adam, {"weight_decay": 0.1}),
    "amsgrad": (optim.AdamW, {"amsgrad": True, "state_format": "fp32"}),
    "Lion": (optim.Lion, {}),
    "SGD": (optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    "SGD without momentum": (optim.SGD, {}),
    "RMSprop": (optim.RMSprop, {"momentum": 0.5}),
    "centered": (optim.RMSprop, {"centered": True, "state_format": "fp32"}),
    "LAMB": (optim.LAMB, {}),
}
PAIRS = [*STATE_FORMATS[:7], "bf16", "fp32", "4bit", ("dynamic4", "rank1_linear4"), ("dynamic_tree", "e4m3_expanded")]


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=random).to(dtype)))


def of(kind: str, net: nn.Module, **options: Any) -> optim.EncodedOptimizer:
    cls, defaults = KINDS[kind]
    return cls(net, lr=1e-2, compiled=False, **(defaults | options))  # type: ignore[call-arg]


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 1) -> None:
    random = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in net.parameters():
            p.grad = torch.randn(p.shape, generator=random).to(p.dtype)
        optimizer.step()


def trained(kind: str = "AdamW", dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Net, Any]:
    net = Net(dtype)
    optimizer = of(kind, net, **options)
    train(net, optimizer, 3)
    return net, optimizer


def raw(value: Any) -> Any:
    """Something that is equal where every bit is."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape, value.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
    if isinstance(value, Mapping):
        return {key: raw(each) for key, each in value.items()}
    return [raw(each) for each in value] if isinstance(value, (list, tuple)) else value


def everything(net: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return raw([dict(net.named_parameters()), torch.optim.Optimizer.state_dict(optimizer)])


def through_a_file(state_dict: Any) -> Any:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# Our own


def test_plain_tensors_under_keys_that_say_what_they_are() -> None:
    _, optimizer = trained(state_format=("e4m3_expanded", "linear4"))
    saved = optimizer.state_dict()
    assert {key: (t.dtype, tuple(t.shape)) for key, t in saved["state"][0].items()} == {
        "step": (torch.float32, ()),
        "exp_avg.e4m3_expanded.codes": (torch.uint8, (67, 130)),
        "exp_avg.e4m3_expanded.amax": (torch.float32, (67, 2)),
        "exp_avg.e4m3_expanded.k": (torch.uint8, (67, 2)),
        "exp_avg_sq.linear4.codes": (torch.uint8, (67, 65)),
        "exp_avg_sq.linear4.amax": (torch.float32, (67, 2)),
    }
    assert saved["state"][3].keys() == {"step", "exp_avg.fp32.value", "exp_avg_sq.fp32.value"}
    assert all(type(t) is Tensor and t.is_contiguous() for state in saved["state"].values() for t in state.values())
    assert [group[VERSION_KEY] for group in saved["param_groups"]] == [VERSION]


def test_codes_go_out_as_bytes_of_the_same_memory() -> None:
    net, optimizer = trained()
    key = "exp_avg.e4m3_expanded.codes"
    live, out = optimizer.state[net.weight][key], optimizer.state_dict()["state"][0][key]
    assert (live.dtype, out.dtype) == (torch.float8_e4m3fn, torch.uint8)
    assert live.data_ptr() == out.data_ptr() and torch.equal(live.view(torch.uint8), out)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "master"),
    [(torch.float32, "none"), (torch.bfloat16, "none"), (torch.bfloat16, "split"), (torch.float16, "fp32")],
)
def test_resuming_from_a_file_changes_no_bit(kind: str, dtype: torch.dtype, master: str) -> None:
    net, optimizer = trained(kind, dtype, master=master)
    other = Net(dtype)
    resumed = of(kind, other, master=master)
    resumed.param_groups[0]["lr"] = 1.0
    other.load_state_dict(through_a_file(net.state_dict()))
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    assert everything(other, resumed) == everything(net, optimizer)
    for each in ((net, optimizer), (other, resumed)):
        train(*each, 2, seed=2)
    assert everything(other, resumed) == everything(net, optimizer)


@pytest.mark.parametrize("fmt", PAIRS)
def test_every_format_resumes(fmt: Any) -> None:
    net, optimizer = trained(state_format=fmt)
    other = Net()
    resumed = of("AdamW", other, state_format=fmt)
    other.load_state_dict(net.state_dict())
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    for each in ((net, optimizer), (other, resumed)):
        train(*each, 1, seed=2)
    assert everything(other, resumed) == everything(net, optimizer)


def test_what_was_loaded_is_not_shared() -> None:
    _, optimizer = trained()
    saved = optimizer.state_dict()
    before = raw(copy.deepcopy(saved))
    other = Net()
    resumed = of("AdamW", other)
    resumed.load_state_dict(saved)
    train(other, resumed, 1)
    assert raw(saved) == before


# torch.optim's, and other formats


def decoded(optimizer: optim.EncodedOptimizer) -> list[dict[str, Tensor]]:
    """The FP32 states, parameter by parameter."""
    return [
        optimizer.plan_of(p, group).decoded(optimizer.state[p], p.shape)
        for group in optimizer.param_groups
        for p in group["params"]
    ]


STOCK: dict[str, type[torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "Adam": torch.optim.Adam,
    "amsgrad": torch.optim.AdamW,
    "SGD": torch.optim.SGD,
    "SGD without momentum": torch.optim.SGD,
    "RMSprop": torch.optim.RMSprop,
    "centered": torch.optim.RMSprop,
}


UNCORRECTED = ("SGD", "SGD without momentum", "RMSprop", "centered")


def stock(kind: str, net: nn.Module) -> torch.optim.Optimizer:
    options = {key: value for key, value in KINDS[kind][1].items() if key != "state_format"}
    return STOCK[kind](net.parameters(), lr=1e-2, **options)  # type: ignore[call-arg]


@pytest.mark.parametrize("kind", STOCK)
def test_a_state_of_torch_is_encoded(kind: str) -> None:
    net = Net()
    theirs = stock(kind, net)
    train(net, theirs, 3)
    ours = of(kind, Net())
    ours.load_state_dict(through_a_file(theirs.state_dict()))
    for p, q, states in zip(net.parameters(), ours.param_groups[0]["params"], decoded(ours), strict=True):
        plan = ours.plan_of(q, ours.param_groups[0])
        for name, codec in plan.codecs:
            exact = theirs.state[p][name]
            assert torch.equal(states[name], codec.decode(codec.encode(exact), exact.shape)), name
        steps = theirs.state[p].get("step")  # SGD counts none; what matters there is that it is not the first step
        assert not states or ours.state[q]["step"] == (1 if steps is None else steps)


@pytest.mark.parametrize("kind", STOCK)
def test_an_exported_state_goes_on_in_torch(kind: str) -> None:
    """One step from the same states: the fresh moments are used before they are encoded, so only FP32 roundings differ.

    The parameter is p - lr d, with d made of terms of which none is larger than ``t`` below, each rounded at most 16
    times; and p itself is rounded at most 4 times (decay, the difference, and the same in the other order). Adam's
    corrections 1 - b**t are torch's in double, ours in FP32: rounding b, and the power, moves them by at most
    2 / (1 - b) roundings (1 - b**t >= (1 - b) t b**(t - 1)), of which the root of the second halves what it gets.
    """
    roundings = 16 + (0 if kind in UNCORRECTED else 2 / (1 - 0.9) + 1 / (1 - 0.999))
    net, ours = trained(kind)
    other = Net()
    theirs = stock(kind, other)
    other.load_state_dict(net.state_dict())
    theirs.load_state_dict(through_a_file(ours.export_fp32_state_dict()))
    for p, states in zip(other.parameters(), decoded(ours), strict=True):
        assert all(torch.equal(theirs.state[p][name], exact) for name, exact in states.items())
        assert states.keys() <= theirs.state[p].keys() <= {*states, "step"}
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    train(net, ours, 1, seed=2)
    train(other, theirs, 1, seed=2)
    for (name, p), q in zip(net.named_parameters(), other.parameters(), strict=True):
        t = largest_term(kind, q, before[name], theirs.state[q])
        assert ((p - q).abs() <= 2.0**-24 * (roundings * 1e-2 * t + 4 * before[name].abs())).all(), name


def largest_term(kind: str, q: Tensor, p: Tensor, states: Mapping[str, Any]) -> Tensor:
    """A bound on the terms whose sum the step is: of each running mean its old value, its new one and the gradient."""
    assert q.grad is not None
    g = q.grad.abs() + 0.1 * p.abs()
    if kind.startswith("SGD"):
        return g + 2 * states["momentum_buffer"].abs() + g if "momentum_buffer" in states else g
    if kind in ("RMSprop", "centered"):
        mean = states["grad_avg"] ** 2 if kind == "centered" else torch.zeros(())
        spread = states["square_avg"] - mean  # rounded relative to square_avg, which is larger by the factor below
        d = g / (spread.sqrt() + 1e-8) * (states["square_avg"] + mean) / spread
        return d + 2 * states["momentum_buffer"].abs() if "momentum_buffer" in states else d
    v = states.get("max_exp_avg_sq", states["exp_avg_sq"]) / (1 - 0.999**4)
    return 3 * (states["exp_avg"].abs() + g) / (1 - 0.9**4) / (v.sqrt() + 1e-8)


def test_torch_takes_over_all_options() -> None:
    net, ours = trained()
    ours.param_groups[0]["lr"] = 0.25
    theirs = torch.optim.AdamW(net.parameters())
    keys = set(theirs.param_groups[0])
    theirs.load_state_dict(ours.export_fp32_state_dict())
    assert theirs.param_groups[0]["lr"] == 0.25
    assert set(theirs.param_groups[0]) - {"param_names"} == keys


@pytest.mark.parametrize("new", PAIRS)
def test_another_format_is_encoded_anew(new: Any) -> None:
    for old in PAIRS:
        net, optimizer = trained(state_format=old)
        other = of("AdamW", Net(), state_format=new)
        other.load_state_dict(optimizer.state_dict())
        parameters = net.parameters(), other.param_groups[0]["params"]
        for before, after, p, q in zip(decoded(optimizer), decoded(other), *parameters, strict=True):
            codecs = dict(optimizer.plan_of(p, optimizer.param_groups[0]).codecs)
            for name, codec in other.plan_of(q, other.param_groups[0]).codecs:
                same = codec == codecs[name]
                exact = before[name] if same else codec.decode(codec.encode(before[name]), p.shape)
                assert torch.equal(after[name], exact), (old, name)


def test_a_group_with_a_part_in_another_format() -> None:
    """Formats may differ by parameter: what was overridden there may not be here."""
    net = Net()
    override(net, state_format="dynamic_tree", names=("weight",))
    optimizer = of("AdamW", net)
    train(net, optimizer, 1)
    other = of("AdamW", Net())
    other.load_state_dict(optimizer.state_dict())
    assert "exp_avg.e4m3_expanded.codes" in other.state[other.param_groups[0]["params"][0]]


# 16-bit parameters


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("old", ["none", "split", "fp32"])
@pytest.mark.parametrize("new", ["none", "split", "fp32"])
def test_low_bits_go_from_one_kind_of_master_to_another(old: str, new: str, dtype: torch.dtype) -> None:
    net, optimizer = trained("AdamW", dtype, master=old)
    other = Net(dtype)
    other.load_state_dict(net.state_dict())
    ours = of("AdamW", other, master=new)
    ours.load_state_dict(optimizer.state_dict())
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), other.parameters(), strict=True))
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        before, after = precise(p, optimizer.state[p]), precise(q, ours.state[q])
        # Exact, but for an FP32 master that goes into 8 bits: they count in 1/256 of the gap to the neighbour, of which
        # rounding takes half, or all of it next to a tie, where the weight may be the one that split would not choose.
        gap = torch.finfo(dtype).eps * p.float().abs().clamp_min(torch.finfo(dtype).smallest_normal)
        lossless = new != "split" or old != "fp32"
        wanted = p.float() if new == "none" else before
        assert ((after - wanted).abs() <= (0 if lossless else gap / 256)).all()


def precise(p: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    if "master" in state:
        return state["master"]
    return joined(p.detach(), state["correction"]) if "correction" in state else p.detach().float()


def test_a_tie_keeps_the_weight_that_is_there() -> None:
    """FP32 to BF16 rounds 1 + 2**-8, a tie, to even: 1. split would take 1 + 2**-7 and -128; beside 1 it must be 127."""
    p = nn.Parameter(torch.tensor([1.0, -1.0]).bfloat16())
    optimizer = optim.AdamW([p], master="split", compiled=False)
    master = torch.tensor([1 + 2.0**-8, -1 - 2.0**-8])
    state = {"step": 1, "exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2), "master": master}
    optimizer.load_state_dict({"state": {0: state}, "param_groups": [{"params": [0]}]})
    assert optimizer.state[p]["correction"].tolist() == [127, 127]


def test_a_state_without_low_bits_starts_from_the_parameter() -> None:
    net = Net(torch.bfloat16)
    theirs = torch.optim.AdamW(net.parameters())
    train(net, theirs, 2)
    for master in ("split", "fp32"):
        ours = of("AdamW", net, master=master)
        ours.load_state_dict(theirs.state_dict())
        for p in net.parameters():
            assert torch.equal(precise(p, ours.state[p]), p.float())


# What does not fit

Change = Callable[[dict[str, Any]], Any]
CODES, AMAX, K = (f"exp_avg.e4m3_expanded.{part}" for part in ("codes", "amax", "k"))


def put(key: str, value: Any) -> Change:
    def change(saved: dict[str, Any]) -> None:
        old = saved["state"][0].get(key)
        saved["state"][0][key] = value(old) if callable(value) else value

    return change


def lose(*keys: str) -> Change:
    return lambda saved: [saved["state"][0].pop(key) for key in keys]


def group(**options: Any) -> Change:
    return lambda saved: saved["param_groups"][0].update(options)


BAD: dict[str, tuple[Change, str]] = {
    "no state": (lambda s: s.pop("state"), "not the state dict of an optimizer"),
    "flat": (lambda s: s.pop("param_groups"), "set_optimizer_state_dict"),
    "states in a list": (lambda s: s.update(state=[]), "not the state dict of an optimizer"),
    "a group too many": (lambda s: s["param_groups"].append({"params": []}), "2 parameter groups, this optimizer 1"),
    "a parameter too few": (lambda s: s["param_groups"][0]["params"].pop(), "4 parameters in the state dict, 5 here"),
    "a parameter too many": (lambda s: s["param_groups"][0]["params"].append(5), "6 parameters in the state dict"),
    "a group without parameters": (lambda s: s["param_groups"][0].pop("params"), "without 'params'"),
    "a parameter of no group": (lambda s: s["state"].update({7: s["state"][0]}), r"in none of its groups: \[7\]"),
    "newer": (group(**{VERSION_KEY: VERSION + 1}), f"version {VERSION + 1}, .* upgrade"),
    "version of no kind": (group(**{VERSION_KEY: "new"}), "version new"),
    "a learning rate below zero": (group(lr=-1.0), "lr"),
    "a state that is none": (lambda s: s["state"].update({0: torch.ones(2)}), "parameter 0 is a Tensor"),
    "no codes": (lose(CODES), "weight: exp_avg has amax, k, and e4m3_expanded is codes, amax, k"),
    "no metadata": (lose(AMAX, K), "exp_avg has codes"),
    "a state missing": (lose(CODES, AMAX, K), "exp_avg is not among step, exp_avg_sq"),
    "no step": (lose("step"), "it has no step"),
    "step of no kind": (put("step", "three"), "its step is 'three'"),
    "step of no shape": (put("step", torch.ones(2)), "its step is"),
    "step not finite": (put("step", math.nan), "its step is nan"),
    "step below zero": (put("step", -1), "its step is -1"),
    "rows cut off": (
        put(CODES, lambda t: t[:-1]),
        r"codes is torch.float8_e4m3fn \[66, 130\], and",
    ),
    "groups cut off": (
        put(AMAX, lambda t: t[:, :1]),
        r"amax is torch.float32 \[67, 1\], and torch.float32 \[67, 2\]",
    ),
    "flattened": (put(CODES, lambda t: t.flatten()), r"\[8710\]"),
    "another dtype": (put(CODES, lambda t: t.float()), "torch.float32"),
    "a signed byte": (put(CODES, lambda t: t.view(torch.int8)), "torch.int8"),
    "k as floats": (put(K, lambda t: t.float()), "k is torch.float32"),
    "a list": (put(CODES, lambda t: t.tolist()), "codes is a list"),
    "a dict": (put(CODES, {}), "codes is not there"),
    "no such format": (put("exp_avg.e9m9.codes", torch.ones(1)), "exp_avg is in several formats"),
    "only no such format": (
        lambda s: [lose(CODES, AMAX, K)(s), put("exp_avg.e9m9.codes", torch.ones(1))(s)],
        "no state format 'e9m9'",
    ),
    "a part too many": (put("exp_avg.e4m3_expanded.shift", torch.ones(1)), "amax, codes, k, shift"),
    "one state twice": (put("exp_avg", torch.zeros(67, 130)), "several formats"),
    "a state of another optimizer": (
        put("momentum_buffer", torch.zeros(67, 130)),
        "it has momentum_buffer, and this",
    ),
    "a format for the other kind of state": (
        lambda s: s["state"].update(
            {0: {"step": 1, "exp_avg.linear4.codes": torch.zeros(1), "exp_avg_sq": torch.zeros(67, 130)}}
        ),
        "linear4' does not fit",
    ),
    "a state of torch, cut off": (
        lambda s: s["state"].update(
            {0: {"step": 1, "exp_avg": torch.zeros(66, 130), "exp_avg_sq": torch.zeros(67, 130)}}
        ),
        r"exp_avg is torch.float32 \[66, 130\], and torch.float32 \[67, 130\] fits",
    ),
    "a state of torch in integers": (
        lambda s: s["state"].update(
            {0: {"step": 1, "exp_avg": torch.zeros(67, 130, dtype=torch.int32), "exp_avg_sq": 0}}
        ),
        "exp_avg is torch.int32",
    ),
    "of the last parameter": (lambda s: s["state"][4].pop("step"), "state of scale: it has no step"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_state_says_what_and_changes_nothing(case: str) -> None:
    net, optimizer = trained()
    saved = through_a_file(optimizer.state_dict())
    change, message = BAD[case]
    change(saved)
    train(net, optimizer, 1, seed=3)  # so that what was saved differs from what is there
    groups, inner = [*map(id, optimizer.param_groups)], {id(p): id(state) for p, state in optimizer.state.items()}
    before = everything(net, optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert everything(net, optimizer) == before
    assert [*map(id, optimizer.param_groups)] == groups
    assert {id(p): id(state) for p, state in optimizer.state.items()} == inner


@pytest.mark.parametrize("case", ["newer", "rows cut off", "of the last parameter"])
def test_after_a_bad_state_training_goes_on(case: str) -> None:
    (net, optimizer), (twin_net, twin) = trained(), trained()
    saved = through_a_file(optimizer.state_dict())
    BAD[case][0](saved)
    with pytest.raises(ValueError):
        optimizer.load_state_dict(saved)
    for each in ((net, optimizer), (twin_net, twin)):
        train(*each, 1, seed=3)
    assert everything(net, optimizer) == everything(twin_net, twin)


def test_the_state_of_another_kind_of_optimizer() -> None:
    adam, lion = trained("AdamW")[1], of("Lion", Net())
    with pytest.raises(ValueError, match=r"it has exp_avg_sq.*, and this optimizer keeps exp_avg"):
        lion.load_state_dict(adam.state_dict())
    with pytest.raises(ValueError, match=r"it has momentum_buffer.*, and this optimizer keeps exp_avg, exp_avg_sq"):
        of("AdamW", Net()).load_state_dict(trained("SGD")[1].state_dict())


def test_parameters_that_had_no_gradient_start_anew() -> None:
    net = Net()
    optimizer = of("AdamW", net)
    net.weight.grad = torch.ones_like(net.weight)
    optimizer.step()
    other = Net()
    resumed = of("AdamW", other)
    train(other, resumed, 1)
    resumed.load_state_dict(optimizer.state_dict())
    assert [*resumed.state] == [other.weight]
    train(other, resumed, 1)
    assert [resumed.state[p]["step"].item() for p in other.parameters()] == [2, 1, 1, 1, 1]


# What else goes through an optimizer


def test_an_empty_state_is_none_yet() -> None:
    """torch makes one of each parameter that the loading optimizer has no state of, in a flattened state dict."""
    optimizer = trained()[1]
    saved = optimizer.state_dict()
    saved["state"][0] = {}
    optimizer.load_state_dict(saved)
    assert len(optimizer.state) == len(SHAPES) - 1


def test_muon_and_torch() -> None:
    """torch.optim.Muon counts no steps and takes matrices only."""
    p = nn.Parameter(torch.randn(67, 130))
    ours, theirs = optim.Muon([p], compiled=False), torch.optim.Muon([p])
    p.grad = torch.randn(67, 130)
    theirs.step()
    ours.load_state_dict(theirs.state_dict())
    codec = dict(ours.plan_of(p, ours.param_groups[0]).codecs)["momentum_buffer"]
    [state] = decoded(ours)
    exact = theirs.state[p]["momentum_buffer"]
    assert torch.equal(state["momentum_buffer"], codec.decode(codec.encode(exact), exact.shape))
    theirs.load_state_dict(ours.export_fp32_state_dict())
    assert torch.equal(theirs.state[p]["momentum_buffer"], state["momentum_buffer"])
    theirs.step()


def test_a_compressed_optimizer_of_torch_reads_and_writes_the_same() -> None:
    net, optimizer = trained()
    theirs = compress(torch.optim.AdamW(net.parameters()))
    theirs.load_state_dict(optimizer.state_dict())
    other = of("AdamW", Net())
    other.load_state_dict(theirs.state_dict())
    states = [each.state_dict()["state"] for each in (optimizer, other)]
    assert raw(states[0]) == raw(states[1])


def test_groups_stay_the_same_objects_and_keep_what_is_unknown() -> None:
    _, optimizer = trained()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0] |= {"lr": 0.5, "initial_lr": 2.0, "note": "x", "state_format": "fp32", "master": "fp32"}
    group, groups = optimizer.param_groups[0], optimizer.param_groups
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups is groups and groups[0] is group
    assert (group["lr"], group["initial_lr"], group["note"]) == (0.5, 2.0, "x")
    assert (group["state_format"], group["master"]) == ("e4m3_expanded", "none")  # for this optimizer to say


def test_adamw_stays_adamw() -> None:
    theirs, ours = stock("Adam", Net()), of("AdamW", Net())
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["decoupled_weight_decay"]


def test_a_learning_rate_may_come_back_as_a_tensor() -> None:
    net, optimizer = trained()
    optimizer.param_groups[0]["lr"] = torch.tensor(1e-2)
    other, resumed = trained()
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    for each in ((net, optimizer), (other, resumed)):
        train(*each, 2, seed=2)
    assert everything(net, optimizer) == everything(other, resumed)


@pytest.mark.parametrize("tensor_lr", [False, True])
def test_a_scheduler_goes_on_after_loading(tensor_lr: bool) -> None:
    def made() -> tuple[Net, optim.EncodedOptimizer, torch.optim.lr_scheduler.LRScheduler]:
        net = Net()
        optimizer = optim.AdamW(net, lr=torch.tensor(0.1) if tensor_lr else 0.1, compiled=False)
        return net, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=7)

    net, optimizer, scheduler = made()
    for _ in range(3):
        train(net, optimizer, 1)
        scheduler.step()
    other, resumed, after = made()
    train(other, resumed, 1)
    other.load_state_dict(net.state_dict())
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    after.load_state_dict(through_a_file(scheduler.state_dict()))
    for _ in range(2):
        for each in ((net, optimizer, scheduler), (other, resumed, after)):
            train(each[0], each[1], 1, seed=2)
            each[2].step()
    assert everything(net, optimizer) == everything(other, resumed)


def test_a_scheduler_may_begin_in_the_middle() -> None:
    _, optimizer = trained()
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    other = of("AdamW", Net())
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    torch.optim.lr_scheduler.ExponentialLR(
        other, 0.5, last_epoch=3
    )  # needs initial_lr, which the scheduler put there


def test_hooks_run_as_in_torch() -> None:
    _, optimizer = trained()
    seen: list[Any] = []

    def other_lr(opt: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        seen.append((opt, "before"))
        groups = [{**group, "lr": 0.75} for group in state_dict["param_groups"]]
        return {**state_dict, "param_groups": groups}

    saved = optimizer.state_dict()
    optimizer.register_load_state_dict_pre_hook(other_lr)
    optimizer.register_load_state_dict_pre_hook(
        lambda opt, state_dict: state_dict["param_groups"][0].pop("eps") and None
    )
    optimizer.register_load_state_dict_post_hook(lambda opt: seen.append((opt, "after")))
    optimizer.register_state_dict_post_hook(lambda opt, state_dict: {**state_dict, "extra": 1})
    optimizer.load_state_dict(saved)
    assert seen == [(optimizer, "before"), (optimizer, "after")]
    assert optimizer.param_groups[0]["lr"] == 0.75 and optimizer.param_groups[0]["eps"] == 1e-8
    assert optimizer.state_dict()["extra"] == 1 and "eps" in saved["param_groups"][0]


def test_formats_are_decided_once() -> None:
    """An override after the first step is for the next optimizer: states stay as they are stored, also through loading."""
    net, optimizer = trained()
    override(net, state_format="fp32", names=("weight",))
    optimizer.load_state_dict(optimizer.state_dict())
    train(net, optimizer, 1)
    assert CODES in optimizer.state[net.weight]
    other = of("AdamW", net)
    other.load_state_dict(optimizer.state_dict())
    assert "exp_avg.fp32.value" in other.state[net.weight]


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda pair: pickle.loads(pickle.dumps(pair)),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("started", [False, True])
def test_a_copy_trains_on_as_the_original(how: str, started: bool) -> None:
    net = Net(torch.bfloat16)
    override(net.conv, state_format="fp32")  # marked on this very parameter, of which a copy knows nothing
    optimizer = of("AdamW", net, overrides={"lo*": "dynamic_tree"}, seed=5)
    if started:
        train(net, optimizer, 2)
        override(net, state_format="fp32", names=("weight",))  # too late for this optimizer and its copies
    other, twin = COPIES[how]((net, optimizer))
    assert {id(p) for p in twin.param_groups[0]["params"]} == {id(p) for p in other.parameters()}
    for each in ((net, optimizer), (other, twin)):
        train(*each, 2, seed=2)
    assert everything(net, optimizer) == everything(other, twin)
    assert raw(twin.state[other.weight][CODES]) == raw(optimizer.state[net.weight][CODES])
    assert str(twin.report()) == str(optimizer.report())


def test_gradient_release_follows_what_was_loaded() -> None:
    net, optimizer = trained()
    release = optimizer.release_gradients(net)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.0
    saved["param_groups"][0]["weight_decay"] = 0.0
    optimizer.load_state_dict(saved)
    before = raw(dict(net.named_parameters()))
    sum(p.sum() for p in net.parameters()).backward()
    release.remove()
    assert raw(dict(net.named_parameters())) == before and net.weight.grad is None


def test_a_grad_scaler_composes() -> None:
    """The scale is a power of two, so scaling and unscaling changes no gradient; an infinite one skips the step."""
    (net, plain), (other, scaled) = trained(), trained()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def loss(of: nn.Module) -> Tensor:
        return sum((p * p.detach().round()).sum() for p in of.parameters())  # type: ignore[return-value]

    net.zero_grad()
    loss(net).backward()
    plain.step()
    other.zero_grad()
    scaler.scale(loss(other)).backward()
    scaler.step(scaled)
    scaler.update()
    assert everything(net, plain) == everything(other, scaled)
    other.zero_grad()
    scaler.scale(loss(other) * math.inf).backward()
    scaler.step(scaled)
    assert everything(net, plain) == everything(other, scaled)


# torch.distributed.checkpoint.state_dict, here without other ranks

EXTREMES = [0.0, -0.0, 1.0, -1.5, 2.0**-24, -(2.0**-24), 2.0**-14, 65504.0, -65504.0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize(
    ("dtype", "master"),
    [(torch.float32, "none"), *((d, m) for d in (torch.bfloat16, torch.float16) for m in ("none", "split", "fp32"))],
)
def test_the_step_that_makes_states_moves_no_parameter(
    kind: str, dtype: torch.dtype, master: str, tensor_lr: bool
) -> None:
    """get_optimizer_state_dict steps once with lr 0 and gradients 0 where there is no state yet."""
    net = Net(dtype)
    with torch.no_grad():
        net.weight[0, : len(EXTREMES)] = torch.tensor(EXTREMES).to(dtype)
    before = raw(dict(net.named_parameters()))
    optimizer = of(kind, net, master=master)
    optimizer.param_groups[0]["lr"] = torch.tensor(1e-2) if tensor_lr else 1e-2
    optimizer.param_groups[0]["weight_decay"] = 0.01
    get_optimizer_state_dict(net, optimizer)
    assert raw(dict(net.named_parameters())) == before


@pytest.mark.parametrize(
    ("flat", "full"), [(False, False), (False, True), (True, False)]
)  # torch loads no (True, True)
def test_state_dicts_by_name(flat: bool, full: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat, full_state_dict=full)
    net, optimizer = trained()
    saved = through_a_file(get_optimizer_state_dict(net, optimizer, options=options))
    assert (f"state.weight.{CODES}" in saved) if flat else (CODES in saved["state"]["weight"])
    other = Net()
    other.load_state_dict(net.state_dict())
    resumed = of("AdamW", other)
    set_optimizer_state_dict(other, resumed, saved, options=options)
    for each in ((net, optimizer), (other, resumed)):
        train(*each, 1, seed=2)
    assert everything(net, optimizer) == everything(other, resumed)


def test_a_flat_state_of_another_format_says_so() -> None:
    """torch looks for the keys that this optimizer has, and finds none of them."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    net, optimizer = trained(state_format="dynamic_tree")
    saved = get_optimizer_state_dict(net, optimizer, options=options)
    with pytest.raises(ValueError, match=r"empty state for each parameter.*zero_grad"):
        set_optimizer_state_dict(net, of("AdamW", net), saved, options=options)
    net.zero_grad()
    with pytest.raises(ValueError, match=r"codes is not there: .*flatten"):
        set_optimizer_state_dict(net, of("AdamW", net), saved, options=options)


SAFETENSORS = {torch.float32: "F32", torch.uint8: "U8", torch.bfloat16: "BF16", torch.int8: "I8"}


def write_safetensors(file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """The format: 8 bytes of length, a JSON header, and the tensors' bytes one after another."""
    header: dict[str, Any] = {"__metadata__": metadata}
    data = b""
    for name, t in tensors.items():
        assert type(t) is Tensor and t.is_contiguous()
        raw_bytes = bytes(t.reshape(-1).view(torch.uint8).numpy())
        offsets = [len(data), len(data) + len(raw_bytes)]
        header[name] = {"dtype": SAFETENSORS[t.dtype], "shape": [*t.shape], "data_offsets": offsets}
        data += raw_bytes
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def read_safetensors(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    content = file.read_bytes()
    start = 8 + struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8:start])
    metadata, dtypes, tensors = header.pop("__metadata__"), {v: k for k, v in SAFETENSORS.items()}, {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        flat = torch.frombuffer(bytearray(content[start + first : start + last]), dtype=dtypes[entry["dtype"]])
        tensors[name] = flat.reshape(entry["shape"])
    return tensors, metadata


@pytest.mark.parametrize(
    ("fmt", "dtype", "master"),
    [("e4m3_expanded", torch.float32, "none"), ("4bit", torch.float32, "none"), ("bf16", torch.bfloat16, "split")],
)
def test_a_flat_file_of_tensors(tmp_path: Path, fmt: str, dtype: torch.dtype, master: str) -> None:
    """safetensors: names and tensors, which share no memory; the groups' options go along as text."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    net, optimizer = trained("AdamW", dtype, state_format=fmt, master=master)
    flat = get_optimizer_state_dict(net, optimizer, options=options)
    tensors = {name: value for name, value in flat.items() if isinstance(value, Tensor)}
    memory = [t.untyped_storage().data_ptr() for t in tensors.values()]
    assert len(set(memory)) == len(memory)
    rest = {name: json.dumps(value) for name, value in flat.items() if name not in tensors}
    write_safetensors(tmp_path / "states.safetensors", tensors, rest)

    read, metadata = read_safetensors(tmp_path / "states.safetensors")
    other = Net(dtype)
    other.load_state_dict(net.state_dict())
    resumed = of("AdamW", other, state_format=fmt, master=master)
    everything_read = read | {name: json.loads(value) for name, value in metadata.items()}
    set_optimizer_state_dict(other, resumed, everything_read, options=options)
    for each in ((net, optimizer), (other, resumed)):
        train(*each, 1, seed=2)
    assert everything(net, optimizer)[0] == everything(other, resumed)[0]
    assert everything(net, optimizer)[1]["state"] == everything(other, resumed)[1]["state"]
