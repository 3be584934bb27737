"""Collapse and surge of a loss scale, and what is told of it."""

from __future__ import annotations

import logging
from collections import deque

import pytest
import torch

from fp8compile.amp import Limits, LossScaleCollapse, LossScaler, watch
from fp8compile.amp.collapse import Watchdog
from tests.support.amp_models import net, sgd, spoil, train


def test_persistent_nan_is_a_collapse_with_the_layers() -> None:
    model = net()
    watch(model)
    scaler, optimizer = LossScaler(limits=Limits(warmup=10, halvings=4)), sgd(model, 1e-3)
    train(scaler, model, optimizer, range(15))
    with torch.no_grad():
        model[0].bias[0] = torch.nan
    before = model[2].weight.detach().clone()
    with pytest.raises(LossScaleCollapse, match="4 bad updates in a row") as caught:
        train(scaler, model, optimizer, range(15, 40))
    assert caught.value.step == 19 and torch.equal(before, model[2].weight)
    assert caught.value.observations == tuple(scaler.observations) and len(scaler.observations) == 1
    assert "the data, or the forward" in str(caught.value)
    assert "step 16: 0 (forward) Linear: NaN" in caught.value.report and caught.value.report in str(caught.value)
    with pytest.raises(LossScaleCollapse):
        train(scaler, model, optimizer, [40])


@pytest.mark.parametrize("mode", ["dynamic", "static"])
def test_other_modes_collapse_on_request(mode: str) -> None:
    for collapse in (None, True):
        model = net()
        scaler = LossScaler(mode, collapse=collapse, limits=Limits(warmup=2, halvings=5))
        every_step = spoil(torch.inf, range(100))
        if collapse:
            with pytest.raises(LossScaleCollapse, match="5 bad updates"):
                train(scaler, model, sgd(model), range(20), every_step)
        else:
            train(scaler, model, sgd(model), range(20), every_step)
            assert scaler.skipped == 20


def watched_by_dog(scales: list[float], verdicts: list[float], limits: Limits) -> list[int]:
    """Updates at which the watchdog calls it a collapse."""
    dog, history, found = Watchdog(limits), deque[tuple[int, float]](), []
    for i, (scale, verdict) in enumerate(zip(scales, verdicts, strict=True), 1):
        history.append((i, scale))
        if dog.look(history, verdict):
            found.append(i)
    return found


def test_what_is_a_collapse() -> None:
    limits = Limits(warmup=20, fall=2.0**10, halvings=8, window=50)
    rise = [2.0**k for k in range(1, 21)]
    settled = [2.0**20, 2.0**19] * 40
    up_and_down = [1.0 if i % 2 else -1.0 for i in range(80)]
    assert watched_by_dog(rise + settled, [1.0] * 20 + up_and_down, limits) == []
    # two down, one up: never 8 in a row, and 2**10 below its peak in the end
    course, scale = [], 2.0**20
    for i in range(45):
        scale *= 2.0 if i % 3 == 2 else 0.5
        course.append(scale)
    verdicts = [1.0 if i % 3 == 2 else -1.0 for i in range(45)]
    found = watched_by_dog(rise + course, [1.0] * 20 + verdicts, limits)
    assert found[0] == next(i for i, s in enumerate(rise + course, 1) if i > 20 and s <= course[0] / 2**10)
    # a fall so slow that its window never saw the peak
    slow = [2.0 ** (20 - i // 20) for i in range(400)]
    assert watched_by_dog(rise + slow, [1.0] * 420, limits) == []
    # 8 in a row; periods in between (0) neither count nor break; a floor hides nothing
    eight = [-1.0, 0.0] * 8
    assert watched_by_dog([1.0] * 25 + [1.0] * 16, [1.0] * 25 + eight, limits)[0] == 25 + 15
    # in the warm-up, as GradScaler's first steps: nothing
    assert watched_by_dog([2.0 ** (16 - i) for i in range(20)], [-1.0] * 20, limits) == []
    assert (
        watched_by_dog([2.0 ** (16 - i) for i in range(20)] + [2.0**-4] * 20, [-1.0] * 20 + [1.0] * 20, limits) == []
    )


def test_a_surge_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    limits = Limits(warmup=5, surge=32.0, window=100)
    with caplog.at_level(logging.WARNING, "fp8compile"):
        watched_by_dog([1024.0, 512.0] * 50, [1.0] * 100, limits)
        assert caplog.text == ""
        watched_by_dog([512.0] * 60 + [2.0 ** (10 + i) for i in range(8)] + [2.0**17] * 30, [1.0] * 98, limits)
    assert caplog.text.count("surged to 16384, 32 times") == 1


def test_als_from_1_is_neither(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    with caplog.at_level(logging.WARNING, "fp8compile"):
        train(LossScaler(), model, sgd(model, 1e-3), range(140))
    assert "surge" not in caplog.text


class Writer:
    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars.append((tag, value, step))


def test_tensorboard_scalars(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    model, writer = net(), Writer()
    scaler = LossScaler(writer=writer)
    train(scaler, model, sgd(model), range(3))
    assert scaler.history == [(s, v) for tag, v, s in writer.scalars if tag == "loss_scale/scale"]
    assert [v for tag, v, _ in writer.scalars if tag == "loss_scale/large_fraction"] == [0, 0, 0]
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)  # as if it were not installed
    with caplog.at_level(logging.WARNING, "fp8compile"):
        train(LossScaler(writer="folder"), model, sgd(model), range(1))
    assert "tensorboard is not installed" in caplog.text
