"""States that are refused: each is told by name, and nothing has changed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fp8compile.optim.checkpoint import VERSION, VERSION_KEY
from tests.support.checkpoints import AMAX, CODES, K, Net, everything, of, through_a_file, train, trained

BF16, FP16 = torch.bfloat16, torch.float16
Change = Callable[[dict[str, Any]], Any]


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


@pytest.mark.parametrize("master", ["split", "fp32", "fp16_scaled"])
@pytest.mark.parametrize(("saved", "other"), [(BF16, FP16), (FP16, BF16)])
def test_a_correction_to_weights_of_another_dtype_is_refused(
    saved: torch.dtype, other: torch.dtype, master: str
) -> None:
    _, optimizer = trained("SGD", saved, master="split")
    state_dict = through_a_file(optimizer.state_dict())
    net, resumed = trained("SGD", other, master=master)
    before = everything(net, resumed)
    with pytest.raises(ValueError, match=f"correction is to a weight of {saved}, and the parameter is {other}"):
        resumed.load_state_dict(state_dict)
    assert everything(net, resumed) == before
    for state in state_dict["state"].values():
        del state["correction"]
    resumed.load_state_dict(state_dict)
    if master == "split":
        assert not any(bool(resumed.state[p]["correction"].any()) for p in net.parameters())


def test_a_correction_that_does_not_say_its_dtype_is_taken() -> None:
    net, optimizer = trained("SGD", BF16, master="split")
    state_dict = optimizer.state_dict()
    for state in state_dict["state"].values():
        del state["correction_mantissa"]
    before = everything(net, optimizer)
    optimizer.load_state_dict(state_dict)
    assert everything(net, optimizer) == before
