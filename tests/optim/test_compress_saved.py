"""State dicts of compressed optimizers: torch's in and out, their own, and parameters and groups that come later."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fp8compile
from fp8compile.numerics.states.registry import state_codec
from tests.optim.test_checking import frozen, same
from tests.support.checkpoints import raw, through_a_file
from tests.support.compressing import (
    SHAPES,
    assert_same_way,
    compressed,
    formats,
    of_torch,
    parameters,
    values,
    with_gradients,
)

# Of each kind: two moments, with a third; a product over all steps; a rate and a mean of one number; a first momentum that is
# the gradient; no states; states that begin as something else than zero.
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {}),
    ("Adam", {"amsgrad": True, "weight_decay": 0.1}),
    ("NAdam", {}),
    ("ASGD", {"t0": 3}),
    ("SGD", {"momentum": 0.9, "dampening": 0.5}),
    ("SGD", {}),
    ("Rprop", {}),
    ("Adagrad", {"initial_accumulator_value": 0.1}),
    ("Muon", {}),
]
UNCOUNTED = ("SGD", "Muon")  # torch.optim counts no steps with these


def train(optimizer: torch.optim.Optimizer, several: list[nn.Parameter], first: int = 0, steps: int = 4) -> None:
    for step in range(first, first + steps):
        with_gradients(step, several)
        optimizer.step()


def like(several: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().clone()) for p in several]


@pytest.mark.parametrize(("name", "options"), KINDS)
def test_a_state_of_torchs_goes_in_and_comes_out_again(name: str, options: dict[str, Any]) -> None:
    """In FP32 it comes out as it went in, key by key and bit by bit, and all three go the same way from there."""
    theirs, plain = of_torch(name, **options)
    train(plain, theirs)
    ours, others = like(theirs), like(theirs)
    optimizer = fp8compile.optim.compress(getattr(torch.optim, name)(ours, **options), "fp32", compiled=False)
    saved = copy.deepcopy(plain.state_dict())
    optimizer.load_state_dict(saved)
    exported = optimizer.export_fp32_state_dict()
    assert exported["param_groups"][0].keys() == saved["param_groups"][0].keys()
    for index, state in saved["state"].items():
        found = exported["state"][index]
        assert found.keys() - state.keys() <= ({"step"} if name in UNCOUNTED else set())
        wanted = {key: value for key, value in state.items() if value is not None}  # SGD's momentum, without any
        assert raw({key: found[key].float() for key in wanted}) == raw({k: v.float() for k, v in wanted.items()})
    back = getattr(torch.optim, name)(others, **options)
    back.load_state_dict(exported)
    before = values(theirs)
    for each, ps in ((plain, theirs), (optimizer, ours), (back, others)):
        train(each, ps, first=4)
    assert all(map(torch.equal, others, theirs))
    if name != "Muon":  # an ulp of a momentum may be another BF16 number, which its products spread
        assert_same_way(ours, theirs, before, 4)


@pytest.mark.parametrize(("name", "options"), KINDS)
def test_saved_and_loaded_it_goes_on_bit_for_bit(name: str, options: dict[str, Any]) -> None:
    ours, optimizer = compressed(name, **options)
    train(optimizer, ours)
    others = like(ours)
    resumed = fp8compile.optim.compress(getattr(torch.optim, name)(others, **options), compiled=False)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    for each, ps in ((optimizer, ours), (resumed, others)):
        train(each, ps, first=4)
    assert all(map(torch.equal, ours, others))
    assert raw(resumed.state_dict()) == raw(optimizer.state_dict())


def test_a_state_of_torchs_is_encoded_and_what_it_lacks_begins_anew() -> None:
    theirs, plain = of_torch("AdamW")
    train(plain, theirs, steps=1)
    state_dict = plain.state_dict()
    del state_dict["state"][1]
    ours, optimizer = compressed("AdamW", "int8")
    optimizer.load_state_dict(state_dict)
    codec = state_codec("int8", signed=True)
    expected = codec.decode(codec.encode(plain.state[theirs[0]]["exp_avg"]), ours[0].shape)
    assert torch.equal(optimizer.export_fp32_state_dict()["state"][0]["exp_avg"], expected)
    assert ours[1] not in optimizer.state
    train(optimizer, ours, steps=1)
    assert [float(optimizer.state[p]["step"]) for p in ours] == [2.0, 1.0, 2.0]


def test_options_come_from_the_state_dict_and_formats_do_not() -> None:
    saved, other = compressed("AdamW", "int8", lr=0.5, betas=(0.8, 0.9))[1], compressed("AdamW")[1]
    other.load_state_dict(saved.state_dict())
    group = other.param_groups[0]
    assert group["lr"] == 0.5 and group["betas"] == (0.8, 0.9) and group["state_format"] == "e4m3_expanded"
    plain = of_torch("AdamW", lr=0.25, foreach=True)[1]
    other.load_state_dict(plain.state_dict())
    with_gradients(0, group["params"])
    other.step()
    assert group["lr"] == 0.25 and formats(other, "exp_avg")[0] == "e4m3_expanded"


def test_another_format_is_encoded_again_where_it_is_loaded() -> None:
    ours, optimizer = compressed("NAdam", "int8")
    train(optimizer, ours)
    _, other = compressed("NAdam", "fp32")
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    assert raw(other.export_fp32_state_dict()["state"]) == raw(optimizer.export_fp32_state_dict()["state"])
    assert formats(other, "exp_avg") == ["fp32"] * 3


WRONG = {
    "another kind": lambda state_dict: state_dict["state"].update(_of("SGD", momentum=0.9)["state"]),
    "other shapes": lambda state_dict: state_dict["state"].update({0: state_dict["state"][1]}),
    "no number": lambda state_dict: state_dict["state"][0].update(mu_product=torch.ones(3)),
    "without a number": lambda state_dict: state_dict["state"][0].pop("mu_product"),
    "more parameters": lambda state_dict: state_dict["param_groups"][0]["params"].append(3),
    "no groups": lambda state_dict: state_dict.pop("param_groups"),
}


def _of(name: str, **options: Any) -> dict[str, Any]:
    ps, optimizer = of_torch(name, **options)
    train(optimizer, ps, steps=1)
    return optimizer.state_dict()


@pytest.mark.parametrize("why", WRONG)
def test_a_state_dict_that_does_not_fit_changes_nothing(why: str) -> None:
    ours, optimizer = compressed("NAdam")
    train(optimizer, ours)
    wrong, before = copy.deepcopy(optimizer.state_dict()), frozen(optimizer)
    WRONG[why](wrong)
    with pytest.raises(ValueError):
        optimizer.load_state_dict(wrong)
    assert same(frozen(optimizer), before)


def test_hooks_of_state_dicts_are_called_once() -> None:
    _, plain = of_torch("AdamW")
    called: list[str] = []
    plain.register_state_dict_post_hook(lambda *_: called.append("out"))
    plain.register_load_state_dict_pre_hook(lambda *_: called.append("in"))
    optimizer = fp8compile.optim.compress(plain, compiled=False)
    optimizer.register_load_state_dict_post_hook(lambda *_: called.append("is in"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert called == ["out", "in", "is in"]


@pytest.mark.parametrize(("name", "options"), KINDS)
def test_parameters_begin_later_and_pause(name: str, options: dict[str, Any]) -> None:
    """Each counts steps of its own, and its state begins with the first of them."""
    (theirs, plain), (ours, optimizer) = of_torch(name, **options), compressed(name, "fp32", **options)
    before = values(ours)
    for step in range(8):
        with_gradients(step, ours, theirs)
        if step < 3:
            ours[0].grad = theirs[0].grad = None
        if step == 5:
            ours[1].grad = theirs[1].grad = None
        plain.step()
        optimizer.step()
    if name != "Muon":  # an ulp of a momentum may be another BF16 number, which its products spread
        assert_same_way(ours, theirs, before, 8)
    assert [float(optimizer.state[p]["step"]) for p in ours[:2]] == [5.0, 7.0]


@pytest.mark.parametrize("name", ["AdamW", "NAdam", "SGD"])
def test_a_group_is_added_with_options_of_its_own(name: str) -> None:
    options: dict[str, Any] = {"momentum": 0.9} if name == "SGD" else {}
    (theirs, plain), (ours, optimizer) = of_torch(name, **options), compressed(name, "fp32", **options)
    more, others = parameters([(48, 128)]), parameters([(48, 128)])
    before = values([*ours, *more])
    train(optimizer, ours)
    train(plain, theirs)
    for each, new in ((optimizer, more), (plain, others)):
        each.add_param_group({"params": new, "lr": 0.05})
    optimizer.param_groups[1]["state_format"] = "fp32"
    for step in range(4, 8):
        with_gradients(step, [*ours, *more], [*theirs, *others])
        optimizer.step()
        plain.step()
    assert_same_way([*ours, *more], [*theirs, *others], before, 8)
    assert optimizer.param_groups[0].keys() == optimizer.param_groups[1].keys()


def test_a_group_that_is_refused_is_not_added() -> None:
    ours, optimizer = compressed("AdamW")
    train(optimizer, ours, steps=1)
    before = frozen(optimizer)
    for wrong in ({"state_format": "e9"}, {"master": "bf16"}, {"fused": True}):
        with pytest.raises(ValueError):
            optimizer.add_param_group({"params": parameters(SHAPES[:1]), **wrong})
        assert same(frozen(optimizer), before)
