"""What optimizers refuse: options where they are given, groups, gradients, entries of state dicts; nothing is half done."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from fp8compile import optim
from fp8compile.numerics.states.registry import ALIASES, SIGNED_ONLY, STATE_FORMATS, UNSIGNED_ONLY

KINDS = ("Adam", "AdamW", "Lion", "SGD", "RMSprop", "LAMB", "Muon")


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(*shape, generator=generator).to(dtype)) for shape in shapes or [(64, 128)]]


def stepped(name: str, *several: nn.Parameter, steps: int = 2, **options: Any) -> Any:
    """An optimizer (in eager mode) that has taken some steps."""
    optimizer = getattr(optim, name)(list(several), compiled=False, **options)
    for i in range(steps):
        for p in several:
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(i)).to(p.dtype)
        optimizer.step()
    return optimizer


def frozen(optimizer: Any) -> Any:
    """All that must not change."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    parameters = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    return copy.deepcopy((optimizer.state_dict(), groups, parameters, len(optimizer.state)))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


BAD: list[tuple[str, dict[str, Any], str]] = [
    *[(name, {"lr": value}, f"lr={value!r}") for name in KINDS for value in (math.inf, math.nan, -1.0, "a", True, None)],
    *[(name, {"weight_decay": value}, "weight_decay=") for name in KINDS for value in ("a", math.nan, -0.1, False)],
    *[(name, {"seed": value}, "seed=") for name in KINDS for value in ("a", 1.5, True, 2**64)],
    *[
        (name, {"betas": value}, "betas")
        for name in ("Adam", "AdamW", "Lion", "LAMB")
        for value in ((0.9,), (0.9, 0.99, 0.999), 0.9, "ab", (0.9, "a"), (0.9, 1.0), (math.nan, 0.9), (-0.1, 0.9), (0, True))
    ],
    *[(name, {"eps": value}, "eps=") for name in ("AdamW", "RMSprop", "LAMB", "Muon") for value in ("a", -1.0, math.inf)],
    *[(name, {"momentum": value}, "momentum=") for name in ("SGD", "RMSprop", "Muon") for value in ("a", math.nan, True)],
    ("SGD", {"dampening": "a"}, "dampening='a'"),
    ("SGD", {"nesterov": 1, "momentum": 0.9}, "nesterov=1"),
    ("RMSprop", {"alpha": "a"}, "alpha='a'"),
    ("RMSprop", {"centered": "no"}, "centered='no'"),
    ("AdamW", {"amsgrad": "no", "state_format": "fp32"}, "amsgrad='no'"),
    ("AdamW", {"maximize": 1}, "maximize=1"),
    ("AdamW", {"capturable": "no"}, "capturable='no'"),
    ("AdamW", {"fused": "no"}, "fused='no'"),
    ("AdamW", {"compiled": "no"}, "compiled='no'"),
    ("AdamW", {"master": 3}, "master=3"),
    ("AdamW", {"master": ["none"]}, "master="),
    ("AdamW", {"state_format": None}, "state_format None"),
    ("AdamW", {"lr": torch.tensor(math.nan)}, "lr=tensor"),
    ("AdamW", {"lr": torch.tensor(-1.0)}, "lr=tensor"),
    ("AdamW", {"lr": torch.ones(2)}, "lr is a tensor"),
    ("AdamW", {"betas": (torch.tensor(math.nan), 0.9)}, "betas="),
    ("Muon", {"ns_steps": 2.5}, "ns_steps=2.5"),
    ("Muon", {"ns_coefficients": (1.0, 2.0)}, "ns_coefficients="),
    ("Muon", {"ns_coefficients": (1.0, 2.0, "a")}, "ns_coefficients="),
    ("Muon", {"adjust_lr_fn": "rms"}, "adjust_lr_fn='rms'"),
    ("AdamW", {"overrides": "fp32"}, "overrides='fp32'"),
    ("AdamW", {"overrides": {3: "fp32"}}, "overrides="),
    ("AdamW", {"overrides": {"*": 3}}, "state_format 3"),
    ("AdamW", {"overrides": {"*": "fp32"}}, "these parameters have none"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "message"), BAD, ids=str)
def test_an_option_is_checked_where_it_is_given(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        getattr(optim, name)(parameters(), **options)
    assert message in str(caught.value)


GROUP_OPTIONS = [each for each in BAD if not {"seed", "compiled", "overrides"} & each[1].keys()]


@pytest.mark.parametrize(("name", "options", "message"), GROUP_OPTIONS[::3], ids=str)
def test_so_is_an_option_of_a_group_and_nothing_is_half_done(
    name: str, options: dict[str, Any], message: str
) -> None:
    first, second = parameters((64, 128), (32, 128))
    optimizer = stepped(name, first)
    before, group = frozen(optimizer), {"params": [second], **options}
    asked = dict(group)
    with pytest.raises(ValueError) as caught:
        optimizer.add_param_group(group)
    assert message in str(caught.value)
    assert same(frozen(optimizer), before) and group.keys() == asked.keys() and group["params"] == [second]
    optimizer.add_param_group({"params": [second]})
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize(
    ("group", "error"),
    [
        ({}, ValueError),
        ({"lr": 1.0}, ValueError),
        (5, ValueError),
        ({"params": [3]}, TypeError),
        ({"params": {1, 2}}, TypeError),
        ({"params": [nn.Parameter(torch.zeros(4, dtype=torch.float64))]}, ValueError),
        ({"params": [torch.ones(4, requires_grad=True) * 2]}, ValueError),
    ],
    ids=["empty", "no params", "no dict", "no tensors", "a set", "float64", "no leaf"],
)
def test_a_group_that_is_none(group: Any, error: type[Exception]) -> None:
    optimizer = stepped("AdamW", *parameters())
    before, asked = frozen(optimizer), dict(group) if isinstance(group, dict) else group
    with pytest.raises(error):
        optimizer.add_param_group(group)
    assert same(frozen(optimizer), before)
    assert group == asked or "params" in asked


def test_a_parameter_that_is_there_already_and_parameters_from_a_generator() -> None:
    p, q = parameters((4, 4), (4, 4))
    optimizer = optim.AdamW([p])
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [p]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": (each for each in [q])})
    assert optimizer.param_groups[1]["params"] == [q]


def test_overrides_match_something() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    for make in (
        lambda o: optim.AdamW(model, overrides=o),
        lambda o: optim.AdamW(model.named_parameters(), overrides=o),
    ):
        with pytest.raises(ValueError, match=r"'0\.wieght' matches no parameter; near it: 0\.weight"):
            make({"*.bias": "fp32", "0.wieght": "fp32"})
        make({"*.bias": "fp32"})
    stock = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="these parameters have none"):
        fp8compile.optim.compress(stock, overrides={"*.bias": "fp32"})
    with pytest.raises(ValueError, match="matches no parameter"):
        fp8compile.optim.compress(stock, model=model, overrides={"bias": "fp32"})
    with pytest.raises(ValueError, match="model=3"):
        fp8compile.optim.compress(stock, model=3)  # type: ignore[arg-type]
    assert "fp8compile_state_version" not in stock.state_dict()["param_groups"][0]


def fails() -> float:
    raise KeyError("the data")


def set_sparse(p: nn.Parameter) -> None:
    p.grad = torch.randn(p.shape).to_sparse()


def set_group(optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = math.nan


@pytest.mark.parametrize("steps", [0, 2], ids=["first step", "later"])
@pytest.mark.parametrize("why", ["closure", "sparse", "option", "compile"])
def test_a_step_that_fails_changes_nothing(why: str, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither parameters nor states nor counters: the second of two parameters is at fault."""
    first, second = parameters((64, 128), (32, 128))
    optimizer = stepped("AdamW", first, second, steps=steps, state_format="e4m3_expanded")
    for p in (first, second):
        p.grad = torch.randn(p.shape)
    before, closure = frozen(optimizer), None
    if why == "closure":
        closure = fails
    elif why == "sparse":
        set_sparse(second)
    elif why == "option":
        set_group(optimizer)
        before = frozen(optimizer)
    else:
        monkeypatch.setattr("fp8compile.optim.base.PreparedStep", lambda *_, **__: fails())
        optimizer.clear_caches()
    with pytest.raises((KeyError, RuntimeError, ValueError)):
        optimizer.step(closure)
    # NaN is not equal to itself
    optimizer.param_groups[0]["lr"] = before[0]["param_groups"][0]["lr"] = before[1][0]["lr"] = 1e-3
    assert same(frozen(optimizer), before)
    monkeypatch.undo()
    optimizer.param_groups[0]["lr"] = 1e-3
    first.grad, second.grad = torch.ones_like(first), torch.ones_like(second)
    optimizer.step()
    assert {float(optimizer.state[p]["step"]) for p in (first, second)} == {steps + 1.0}


def put(value: float, key: str) -> Callable[[dict[str, Any]], None]:
    """One element of a tensor of the first parameter's state becomes ``value``."""

    def change(state_dict: dict[str, Any]) -> None:
        state_dict["state"][0][key].view(-1)[3] = value

    return change


def replace(value: Any, *path: Any) -> Callable[[dict[str, Any]], None]:
    """An entry becomes another."""

    def change(state_dict: dict[str, Any]) -> None:
        *outer, last = path
        for each in outer:
            state_dict = state_dict[each]
        state_dict[last] = value

    return change


E4M3 = "e4m3_expanded"
ENTRIES: list[tuple[str, Callable[[dict[str, Any]], None], str]] = [
    (E4M3, put(math.nan, "exp_avg.e4m3_expanded.amax"), "exp_avg.e4m3_expanded.amax holds NaN or inf"),
    (E4M3, put(math.inf, "exp_avg_sq.e4m3_expanded.amax"), "exp_avg_sq.e4m3_expanded.amax holds NaN or inf"),
    (E4M3, put(-1.0, "exp_avg.e4m3_expanded.amax"), "exp_avg.e4m3_expanded.amax holds negative"),
    (E4M3, put(0, "exp_avg.e4m3_expanded.k"), "exp_avg.e4m3_expanded.k has a k of 0"),
    (E4M3, put(0x7F, "exp_avg.e4m3_expanded.codes"), "exp_avg.e4m3_expanded.codes holds codes of NaN"),
    (E4M3, put(0xFF, "exp_avg_sq.e4m3_expanded.codes"), "exp_avg_sq.e4m3_expanded.codes holds codes of NaN"),
    (E4M3, put(0x90, "exp_avg_sq.e4m3_expanded.codes"), "codes of negative numbers"),
    ("e5m2", put(0x7C, "exp_avg.e5m2.codes"), "exp_avg.e5m2.codes holds codes of NaN or inf"),
    ("e5m2", put(-1.0, "exp_avg.e5m2.inv_scale"), "exp_avg.e5m2.inv_scale holds negative"),
    ("int8", put(-128, "exp_avg.int8.codes"), "exp_avg.int8.codes holds -128"),
    ("int8_companded", put(-128, "exp_avg.int8_companded.codes"), "holds -128"),
    ("dynamic_tree", put(math.nan, "exp_avg.dynamic_tree.amax"), "exp_avg.dynamic_tree.amax holds NaN"),
    (("dynamic4", "rank1_linear4"), put(math.nan, "exp_avg_sq.rank1_linear4.column_amax"), "column_amax holds NaN"),
    (("dynamic4", "rank1_linear4"), put(-1.0, "exp_avg_sq.rank1_linear4.row_amax"), "row_amax holds negative"),
    ("fp32", put(math.nan, "exp_avg.fp32.value"), "exp_avg.fp32.value holds NaN"),
    ("bf16", put(math.inf, "exp_avg.bf16.value"), "exp_avg.bf16.value holds NaN or inf"),
    ("fp32", put(-1.0, "exp_avg_sq.fp32.value"), "exp_avg_sq.fp32.value holds negative"),
    (E4M3, replace(None, "state", 0, "exp_avg.e4m3_expanded.amax"), "its exp_avg.e4m3_expanded.amax is None"),
    (E4M3, replace("a", "state", 0, "exp_avg.e4m3_expanded.codes"), "codes is a str"),
    (E4M3, replace(None, "state", 0, "step"), "its step is None"),
    (E4M3, replace(True, "state", 0, "step"), "its step is True"),
    (E4M3, replace(math.nan, "state", 0, "step"), "its step is nan"),
    (E4M3, replace(-1.0, "state", 0, "step"), "its step is -1.0"),
    (E4M3, replace("a", "state", 0, "step"), "its step is 'a'"),
    (E4M3, replace(None, "state", 0), "is a NoneType, not a dict"),
    (E4M3, replace(None, "state"), "not the state dict of an optimizer"),
    (E4M3, replace(5, "param_groups", 0, "params"), "without 'params'"),
    (E4M3, replace([0, 0], "param_groups", 0, "params"), "stand twice"),
    (E4M3, replace(None, "param_groups", 0), "without 'params'"),
    (E4M3, replace(math.nan, "param_groups", 0, "lr"), "param_groups[0] of the state dict: lr=nan"),
    (E4M3, replace((0.9,), "param_groups", 0, "betas"), "param_groups[0] of the state dict: betas=(0.9,)"),
    (E4M3, replace("a", "param_groups", 0, "weight_decay"), "weight_decay='a'"),
    (E4M3, replace(torch.tensor(math.inf), "param_groups", 0, "lr"), "lr=tensor(inf)"),
]


@pytest.mark.parametrize(("fmt", "change", "message"), ENTRIES, ids=[each[2] for each in ENTRIES])
def test_an_entry_that_cannot_be_is_refused_by_name(fmt: Any, change: Callable[..., None], message: str) -> None:
    first, second = parameters((64, 128), (32, 128))
    optimizer = stepped("AdamW", first, second, state_format=fmt)
    state_dict = copy.deepcopy(optimizer.state_dict())
    change(state_dict)
    for _ in range(2):
        for p in (first, second):
            p.grad = torch.ones_like(p)
        optimizer.step()
    before = frozen(optimizer)
    with pytest.raises(ValueError) as caught:
        optimizer.load_state_dict(state_dict)
    assert message in str(caught.value)
    assert same(frozen(optimizer), before)


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_so_are_those_of_torchs_state_dicts(key: str) -> None:
    [p] = parameters()
    stock = torch.optim.AdamW([p])
    p.grad = torch.ones_like(p)
    stock.step()
    state_dict = copy.deepcopy(stock.state_dict())
    for value, message in ((math.nan, "holds NaN or inf"), (-1.0, "holds negative")):
        state_dict["state"][0][key] = torch.full_like(p, value)
        compressed = fp8compile.optim.compress(torch.optim.AdamW([p]))
        for optimizer in (optim.AdamW([p]), compressed):
            if key == "exp_avg" and value == -1.0:
                optimizer.load_state_dict(copy.deepcopy(state_dict))
                continue
            with pytest.raises(ValueError, match=f"{key} {message}"):
                optimizer.load_state_dict(state_dict)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_copy_in_fp32_too_and_no_correction_is_refused(dtype: torch.dtype) -> None:
    [p] = parameters(dtype=dtype)
    whole = stepped("AdamW", p, master="fp32")
    bad = copy.deepcopy(whole.state_dict())
    bad["state"][0]["master"].view(-1)[0] = math.nan
    with pytest.raises(ValueError, match="master holds NaN or inf"):
        whole.load_state_dict(bad)
    cut = stepped("AdamW", p, master="split")
    good = copy.deepcopy(cut.state_dict())
    good["state"][0]["correction"].fill_(-128)
    cut.load_state_dict(good)


@pytest.mark.parametrize("fmt", [f for f in STATE_FORMATS if f not in (*SIGNED_ONLY, *UNSIGNED_ONLY)] + [*ALIASES])
def test_what_an_optimizer_has_made_is_never_refused(fmt: str) -> None:
    """Zeros, subnormals, the largest numbers, groups of one value; of every format."""
    x = torch.zeros(64, 128)
    x[1], x[2], x[3], x[4] = 1e-42, 1e18, -3.0, torch.linspace(-1e-30, 1e9, 128)
    p = nn.Parameter(torch.zeros_like(x))
    optimizer = optim.AdamW([p], state_format=fmt, compiled=False)
    for _ in range(3):
        p.grad = x.clone()
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    assert same(optimizer.state_dict(), saved)


def test_sgd_has_no_momentum_before_its_first_step() -> None:
    """torch.optim writes None for it; and None nowhere else."""
    [p] = parameters()
    stock = torch.optim.SGD([p], momentum=0.9)
    state_dict = stock.state_dict()
    state_dict["state"] = {0: {"momentum_buffer": None}}
    optim.SGD([p], momentum=0.9).load_state_dict(state_dict)


@pytest.mark.parametrize("state_dict", [None, 5, []], ids=str)
def test_a_state_dict_that_is_none(state_dict: Any) -> None:
    with pytest.raises(ValueError, match=type(state_dict).__name__):
        optim.AdamW(parameters()).load_state_dict(state_dict)
