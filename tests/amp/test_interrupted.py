"""What goes on after an interruption: a collapse that was acknowledged, a copy, a state that cannot be."""

from __future__ import annotations

import copy
import io
import logging
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fp8compile.amp import Limits, LossScaleCollapse, LossScaler, watch
from fp8compile.amp.buckets import clip_
from fp8compile.amp.policies import Histogram, PolicyState, UpdateStats
from tests.support.amp_models import batch, grown, loss_of, net, sgd, spoil, train

SHORT = Limits(warmup=5, halvings=3)


def collapsed(mode: str = "histogram") -> tuple[LossScaler, nn.Sequential, torch.optim.Optimizer]:
    """A scaler whose step has just raised, at update 15: the gradients of step 12 and later are NaN."""
    model = net()
    scaler, optimizer = LossScaler(mode, collapse=True, limits=SHORT), sgd(model, 1e-3)
    train(scaler, model, optimizer, range(12))
    with pytest.raises(LossScaleCollapse, match="3 bad updates in a row"):
        train(scaler, model, optimizer, range(12, 40), spoil(math.nan, range(12, 15)))
    return scaler, model, optimizer


@pytest.mark.parametrize("then", ["step again", "update", "next loss"])
@pytest.mark.parametrize("mode", ["histogram", "dynamic", "static"])
def test_training_goes_on_after_a_collapse(mode: str, then: str, caplog: pytest.LogCaptureFixture) -> None:
    """The parameters are what they are without a scaler, whichever way the step that raised is left: unscaled once."""
    scaler, model, optimizer = collapsed(mode)
    alone = copy.deepcopy(model)
    other = sgd(alone, 1e-3)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with caplog.at_level(logging.WARNING, "fp8compile"):
        said = scaler.acknowledge()
    assert said is not None and said.startswith("update 15: 3 bad updates in a row") and said in caplog.text
    assert scaler.acknowledge() is None
    if then == "step again":
        scaler.step(optimizer)
    if then != "next loss":
        scaler.update()
    scale = scaler.get_scale()
    steps = [15, 16, 17] if then == "step again" else [16, 17]
    train(scaler, model, optimizer, [16, 17])
    for i in steps:
        other.zero_grad()
        (loss_of(alone, batch(i)) * scale).backward()
        for p in alone.parameters():
            assert p.grad is not None
            p.grad.div_(scale)
        other.step()
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=2**-9, atol=2**-11)  # the scale may have doubled: other subnormals
    assert scaler.history[-1][0] == 15 + (then != "next loss") + 2


def test_after_it_the_watchdog_begins_anew() -> None:
    """Neither the peak before nor the bad updates before count; three new ones do, without another warm-up."""
    scaler, model, optimizer = collapsed()
    scaler.acknowledge()
    train(scaler, model, optimizer, range(20, 23), spoil(math.nan, [20, 21]))
    train(scaler, model, optimizer, range(23, 26), spoil(math.nan, [23, 24]))
    with pytest.raises(LossScaleCollapse, match="3 bad updates in a row"):
        train(scaler, model, optimizer, range(26, 31), spoil(math.nan, [26, 27, 28]))
    falling = LossScaler(limits=Limits(warmup=2, fall=4.0, halvings=100))
    other = net()
    with pytest.raises(LossScaleCollapse, match="fell from"):
        train(falling, other, sgd(other), range(20), spoil(math.nan, range(8, 20)))
    falling.acknowledge()
    again = LossScaler(limits=Limits(warmup=2, fall=4.0, halvings=100))
    again.load_state_dict(falling.state_dict())
    for scaler in (falling, again):
        train(scaler, other, sgd(other), range(20, 24))
        with pytest.raises(LossScaleCollapse, match="fell from"):
            train(scaler, other, sgd(other), range(24, 40), spoil(math.nan, range(24, 40)))


def test_the_error_goes_to_another_process() -> None:
    model = net()
    watch(model)
    scaler = LossScaler(limits=SHORT)
    with pytest.raises(LossScaleCollapse) as caught:
        train(scaler, model, sgd(model), range(40), spoil(math.nan, range(10, 40)))
    there = pickle.loads(pickle.dumps(caught.value))
    assert str(there) == str(caught.value) and there.observations == () and caught.value.observations
    assert (there.why, there.step, there.scale, there.report) == tuple(
        getattr(caught.value, name) for name in ("why", "step", "scale", "report")
    )


def by_torch(scaler: LossScaler) -> LossScaler:
    file = io.BytesIO()
    torch.save(scaler, file)
    file.seek(0)
    loaded: LossScaler = torch.load(file, weights_only=False)
    return loaded


WAYS = [copy.deepcopy, copy.copy, lambda scaler: pickle.loads(pickle.dumps(scaler)), by_torch]


@pytest.mark.parametrize("way", WAYS, ids=["deepcopy", "copy", "pickle", "torch.save"])
@pytest.mark.parametrize("mode", ["histogram", "dynamic", "static"])
def test_a_copy_goes_on_as_the_original(mode: str, way: Any) -> None:
    model = net()
    own = {"histogram": {"growth_interval": 2, "period": 2}, "dynamic": {"growth_interval": 2}}.get(mode, {})
    scaler = LossScaler(mode, **own, limits=Limits(warmup=3, surge=3.0), collapse=True)
    assert way(scaler).state_dict() == scaler.state_dict()  # before any loss
    optimizer = sgd(model)
    train(scaler, model, optimizer, range(7), spoil(math.nan, [3]))
    twin, other = copy.deepcopy(model), way(scaler)
    second = sgd(twin)
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert other.state_dict() == scaler.state_dict() and other.get_scale() == scaler.get_scale()
    assert train(other, twin, second, range(7, 20)) == train(scaler, model, optimizer, range(7, 20))
    assert other.state_dict() == scaler.state_dict() and other.options == scaler.options
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("way", WAYS, ids=["deepcopy", "copy", "pickle", "torch.save"])
def test_a_collapse_and_what_is_off_are_copied(way: Any) -> None:
    scaler, model, optimizer = collapsed()
    scaler.update()
    other = way(scaler)
    with pytest.raises(LossScaleCollapse):
        train(other, model, optimizer, [20])
    assert not way(LossScaler(enabled=False)).is_enabled()


def test_a_copy_in_the_middle_of_an_iteration_is_refused() -> None:
    model = net()
    scaler = LossScaler()
    scaler.scale(loss_of(model, batch(0))).backward()
    for way in WAYS:
        with pytest.raises(RuntimeError, match=r"Copy it after update\(\)"):
            way(scaler)


def test_what_belongs_to_this_process(caplog: pytest.LogCaptureFixture) -> None:
    class Writer:
        def add_scalar(self, tag: str, value: float, step: int) -> None: ...

        def __reduce__(self) -> Any:
            raise TypeError("a writer has threads")

    writer = Writer()
    scaler = LossScaler(writer=writer)
    assert copy.deepcopy(scaler)._ledger.writer is writer
    with caplog.at_level(logging.WARNING, "fp8compile"):
        assert pickle.loads(pickle.dumps(scaler))._ledger.writer is None
    assert "pickled without its writer" in caplog.text


BAD_STATES: list[tuple[dict[str, Any], str]] = [
    ({"scale": "8"}, "scale is '8'"),
    ({"scale": True}, "scale is True"),
    ({"scale": math.inf}, "scale is inf"),
    ({"scale": 2.0**40}, "within"),
    ({"since": -1}, "since is -1"),
    ({"since": 1.5}, "since is 1.5"),
    ({"small": math.nan}, "small is nan"),
    ({"large": -1.0}, "large is -1.0"),
    ({"quiet": -2}, "quiet is -2"),
    ({"updates": None}, "lacks updates"),
    ({"updates": "3"}, "updates is '3'"),
    ({"idle": 0}, "idle is 0"),
    ({"skipped": -1}, "skipped is -1"),
    ({"history": 5}, "history is 'int'"),
    ({"history": [(1, 2.0), (2, "a")]}, r"history\[1\] is \(2, 'a'\)"),
    ({"history": [(1, 2.0), 7]}, r"history\[1\] is 7"),
    ({"watchdog": {"bad_in_a_row": "a"}}, "bad_in_a_row is 'a'"),
    ({"watchdog": {"acknowledged": -1}}, "acknowledged is -1"),
    ({"watchdog": {"window": 0}}, "window=0"),
    ({"watchdog": {"fall": math.nan}}, "fall=nan"),
    ({"options": {"threshold": 2}}, "threshold=2"),
    ({"options": {"period": "a"}}, "period='a'"),
    ({"options": {"bounds": (4.0,)}}, r"bounds is \(4.0,\)"),
    ({"options": {"bounds": (4.0, math.nan)}}, "ceiling=nan"),
]


@pytest.mark.parametrize(("change", "message"), BAD_STATES, ids=str)
def test_a_state_with_a_bad_value_changes_nothing(change: dict[str, Any], message: str) -> None:
    model = net()
    scaler, optimizer = LossScaler(limits=SHORT), sgd(model)
    train(scaler, model, optimizer, range(7))
    before = scaler.state_dict()
    nested = {key: {**before[key], **value} if isinstance(value, dict) else value for key, value in change.items()}
    bad = {name: value for name, value in {**before, **nested}.items() if value is not None or name == "idle"}
    with pytest.raises(ValueError, match=message):
        scaler.load_state_dict(bad)
    assert scaler.state_dict() == before and scaler.options == LossScaler(limits=SHORT).options
    assert scaler._ledger.watchdog.limits == SHORT
    train(scaler, model, optimizer, [7])


@pytest.mark.parametrize("state", [None, 5, [1]], ids=str)
def test_a_state_that_is_no_dict(state: Any) -> None:
    with pytest.raises(ValueError, match=type(state).__name__):
        LossScaler().load_state_dict(state)


def test_a_state_from_before_there_was_acknowledge() -> None:
    old = LossScaler().state_dict()
    del old["watchdog"]["acknowledged"]
    LossScaler().load_state_dict(old)


BAD_TYPES: list[tuple[dict[str, Any], str]] = [
    ({"mode": 3}, "mode=3"),
    ({"mode": None}, "mode=None"),
    ({"init_scale": "8"}, "init_scale='8'"),
    ({"init_scale": True}, "init_scale=True"),
    ({"init_scale": torch.tensor(8.0)}, r"init_scale=tensor.*value\.item"),
    ({"init_scale": math.nan}, "init_scale=nan"),
    ({"growth_factor": "2"}, "growth_factor='2'"),
    ({"growth_factor": math.inf}, "growth_factor=inf"),
    ({"backoff_factor": None}, "backoff_factor=None"),
    ({"growth_interval": 2.0}, "growth_interval=2.0"),
    ({"growth_interval": True}, "growth_interval=True"),
    ({"period": "1"}, "period='1'"),
    ({"period": True}, "period=True"),
    ({"threshold": "1e-7"}, "threshold='1e-7'"),
    ({"threshold": math.nan}, "threshold=nan"),
    ({"floor": "1"}, "floor='1'"),
    ({"floor": math.nan}, "floor=nan"),
    ({"floor": -1.0}, "floor=-1"),
    ({"floor": 8.0, "ceiling": 4.0, "init_scale": 8.0}, "floor=8.0 and ceiling=4.0"),
    ({"ceiling": [1]}, r"ceiling=\[1\]"),
    ({"kinds": "weight"}, "kinds='weight'"),
    ({"kinds": None}, "kinds=None"),
    ({"kinds": 5}, "kinds=5"),
    ({"modules": "up"}, r"modules=\('up',\)"),
    ({"modules": (1,)}, r"modules=\(1,\)"),
    ({"modules": None}, "modules=None"),
    ({"modules": ()}, r"modules=\(\)"),
    ({"collapse": 1}, "collapse=1"),
    ({"enabled": "no"}, "enabled='no'"),
    ({"limits": {"warmup": 5}}, "limits="),
    ({"process_group": 3}, "process_group=3"),
    ({"writer": 3}, "writer=3"),
    ({"grow_interval": 3}, "'grow_interval'. Did you mean 'growth_interval'"),
]


@pytest.mark.parametrize(("options", "message"), BAD_TYPES, ids=str)
def test_every_option_is_checked_where_it_is_given(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LossScaler(**options)


@pytest.mark.parametrize(
    "limits",
    [
        {"warmup": -1},
        {"warmup": 1.5},
        {"fall": 1.0},
        {"fall": "a"},
        {"halvings": 0},
        {"surge": math.nan},
        {"window": True},
    ],
    ids=str,
)
def test_every_limit_is_checked(limits: dict[str, Any]) -> None:
    [(name, value)] = limits.items()
    with pytest.raises(ValueError, match=f"{name}={value!r}"):
        Limits(**limits)


def test_numbers_of_numpy_are_numbers(tmp_path: Any) -> None:
    LossScaler(init_scale=np.float32(8), period=np.int64(2), floor=0, ceiling=math.inf)
    LossScaler("dynamic", growth_interval=3, backoff_factor=np.float64(0.25))
    Limits(fall=math.inf, warmup=np.int32(3))


def test_clip_keeps_the_sign_of_an_infinity_and_leaves_the_rest() -> None:
    """Of every dtype: an FP16 number once, it is the largest there is, on its own side of 0."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        x = torch.tensor([torch.inf, -torch.inf, torch.nan, 3.0, -1e5], dtype=torch.float32).to(dtype)
        clip_(x)
        largest = torch.tensor(65504.0).to(dtype)
        kept = torch.tensor(-1e5 if dtype != torch.float16 else -65504.0).to(dtype)
        assert x[0] == largest and x[1] == -largest and x[2].isnan() and x[3] == 3 and x[4] == kept


def test_after_each_rise_the_good_updates_are_counted_anew() -> None:
    """Once settled, the scale doubles at every third good decision; a bad one starts the count, as the first ever does."""
    policy, now, found = (
        Histogram(1, 2.0**-10, 2.0**10, 0.25, interval=3),
        PolicyState.start(8.0, torch.device("cpu")),
        [],
    )
    for bad in [1, *[0] * 7, 1, *[0] * 4]:
        seen = UpdateStats(torch.tensor([1 - bad, bad, 0, 0, 0], dtype=torch.float64))
        now, _ = policy(now, seen)
        found.append((now.scale.item(), int(now.quiet)))
    assert found == [
        *[(4, 0), (4, 1), (4, 2), (8, 0), (8, 1), (8, 2), (16, 0), (16, 1)],
        *[(8, 0), (8, 1), (8, 2), (16, 0), (16, 1)],
    ]


def test_the_state_before_it_was_halved_is_not_settled() -> None:
    assert grown(LossScaler(), 4.0).state_dict()["quiet"] == -1
