"""What ends a step, to which one a call of ``log`` belongs, and that watching changes nothing and breaks nothing."""

from __future__ import annotations

import copy
import gc
import logging
import math
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import fp8compile
from fp8compile.amp import LossScaler
from fp8compile.extras.watching import watcher as module
from tests.support.written import batch, chain, lines_of, loss_of, sgd, steps_of


def train(
    model: nn.Module, steps: int, optimizer: torch.optim.Optimizer | None = None, begin: int = 1
) -> list[float]:
    optimizer, losses = optimizer or sgd(model), list[float]()
    for step in range(begin, begin + steps):
        loss = loss_of(model, batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def test_a_header_and_a_line_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(perf_counter=lambda: float(clock.now), now=8)
    monkeypatch.setattr(module, "time", clock)
    model = chain("up", "down")
    began = round(time.time(), 3)
    with fp8compile.extras.watching.watch(model, folder=tmp_path):
        for number in range(1, 4):
            train(model, 1, begin=number)
            clock.now += number
    header, *steps = lines_of(tmp_path)
    assert header["schema"] == "fp8compile.run/1" and header["model"] == "Sequential"
    assert (header["parameters"], header["optimizer"], header["scaler"]) == (2 * (8 * 8 + 8), "SGD", None)
    assert [step["step"] for step in steps] == [1, 2, 3]
    times = [began, *(step["time"] for step in steps), round(time.time(), 3)]
    assert times == sorted(times) and "seconds" not in steps[0]
    assert [step["seconds"] for step in steps[1:]] == [1, 2]


@pytest.mark.parametrize("behind", [False, True])
def test_log_is_about_the_step_it_was_called_in(tmp_path: Path, behind: bool) -> None:
    model = chain("up")
    optimizer = sgd(model)
    with fp8compile.extras.watching.watch(model, None, optimizer, tmp_path) as watcher:
        for step in range(1, 4):
            loss = loss_of(model, batch(step))
            loss.backward()
            if behind:
                optimizer.step()
            watcher.log(loss=torch.tensor(step / 2), tokens=10 * step, lr=step)
            watcher.log(loss=step / 2 + 1, tokens=1)  # of a second micro-batch
            if not behind:
                optimizer.step()
    steps = steps_of(tmp_path)
    assert [step["loss"] for step in steps] == [n / 2 + 0.5 for n in (1, 2, 3)]
    assert [step["tokens"] for step in steps] == [11, 21, 31] and [step["lr"] for step in steps] == [1, 2, 3]
    # Both numbers are rounded to seven digits, to half a unit of the last.
    expected = [step["tokens"] / step["seconds"] for step in steps[1:]]
    assert [step["tokens_per_s"] for step in steps[1:]] == pytest.approx(expected, rel=1e-6)


def test_a_loss_that_changes_later_is_written_as_it_was(tmp_path: Path) -> None:
    model, loss = chain("up"), torch.tensor(2.0)
    with fp8compile.extras.watching.watch(model, folder=tmp_path) as watcher:
        watcher.log(loss=loss)
        loss.fill_(math.nan)
        train(model, 1)
    assert steps_of(tmp_path)[0]["loss"] == 2


def test_a_loss_that_is_nan_is_an_overflow(tmp_path: Path) -> None:
    model = chain("up")
    with fp8compile.extras.watching.watch(model, folder=tmp_path) as watcher:
        watcher.log(loss=math.nan)
        train(model, 2)
    first, second = steps_of(tmp_path)
    assert first["words"] == {"loss": "nan"} and first["overflow"]["line"].startswith("step 1: the loss was nan;")
    assert "overflow" not in second


def test_watching_changes_no_bit(tmp_path: Path) -> None:
    model = chain("up", "down")
    alone = copy.deepcopy(model)
    with fp8compile.extras.watching.watch(model, folder=tmp_path, sqnr_every=1):
        losses = train(model, 5)
    assert losses == train(alone, 5)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), alone.parameters(), strict=True))


def test_steps_go_on_where_the_run_does(tmp_path: Path) -> None:
    model = chain("up")
    adam = torch.optim.AdamW(model.parameters(), lr=1e-4)
    train(model, 6, adam)  # before it was watched: a checkpoint's
    with fp8compile.extras.watching.watch(model, None, adam, tmp_path):
        train(model, 2, adam)
    with fp8compile.extras.watching.watch(model, None, adam, tmp_path, first_step=40):
        train(model, 2, adam)
    assert [line.get("step") for line in lines_of(tmp_path)] == [None, 7, 8, None, 40, 41]


def test_with_a_scaler_its_updates_are_the_steps(tmp_path: Path) -> None:
    model, scaler = chain("up"), LossScaler("static", init_scale=8.0)
    optimizers = [torch.optim.SGD([p], lr=1e-3) for p in model.parameters()]
    with fp8compile.extras.watching.watch(model, scaler, None, tmp_path):
        for step in range(1, 4):
            scaler.scale(loss_of(model, batch(step))).backward()
            for each in optimizers:
                scaler.step(each)
            scaler.update()
    assert [(step["step"], step["scale"]) for step in steps_of(tmp_path)] == [(1, 8), (2, 8), (3, 8)]


def test_another_model_s_optimizer_ends_no_step(tmp_path: Path) -> None:
    model, other = chain("up"), chain("up")
    with fp8compile.extras.watching.watch(model, folder=tmp_path):
        train(other, 2)
        train(model, 1)
        train(other, 2)
    assert len(steps_of(tmp_path)) == 1


def test_a_step_by_hand(tmp_path: Path) -> None:
    model = chain("up")
    with fp8compile.extras.watching.watch(model, folder=tmp_path) as watcher:
        for loss in (3.0, 2.0):
            watcher.log(loss=loss)
            watcher.step()
    assert [step["loss"] for step in steps_of(tmp_path)] == [3, 2]


def test_a_fault_of_the_watcher_ends_the_watching_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = chain("up")
    watcher = fp8compile.extras.watching.watch(model, folder=tmp_path)
    train(model, 2)
    monkeypatch.setattr(module, "memory_of", lambda device: 1 / 0)
    with caplog.at_level(logging.WARNING, "fp8compile"):
        assert len(train(model, 3)) == 3
    watcher.close()
    assert ["watches no longer" in record.getMessage() for record in caplog.records] == [True]
    assert "ZeroDivisionError" in caplog.text


def test_a_model_that_nobody_keeps_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING, "fp8compile"),
        fp8compile.extras.watching.watch(chain("up"), folder=tmp_path) as watcher,
    ):
        gc.collect()
        watcher.step()
    assert module.GONE in caplog.text


def test_closing_writes_what_is_under_way_and_takes_the_hooks_off(tmp_path: Path) -> None:
    model = chain("up")
    watcher = fp8compile.extras.watching.watch(model, folder=tmp_path)
    assert not (tmp_path / "rank0.jsonl").exists()
    train(model, 2)
    assert len(steps_of(tmp_path)) == 1  # the second waits for its end
    train(model, 1)  # by another optimizer: the first is gone
    watcher.close()
    watcher.close()
    train(model, 2)
    assert len(steps_of(tmp_path)) == 3


def test_it_keeps_no_model_alive(tmp_path: Path) -> None:
    model = chain("up")
    watcher, gone = fp8compile.extras.watching.watch(model, folder=tmp_path), weakref.ref(model)
    train(model, 2)
    del model
    gc.collect()
    assert gone() is None
    watcher.close()


def test_a_file_of_its_own_for_each_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "rank_and_world", lambda: (3, 4))
    model, got = chain("up"), list[Any]()
    with fp8compile.extras.watching.watch(model, folder=tmp_path, to=[lambda *each: got.append(each)]):
        train(model, 1)
    assert len(steps_of(tmp_path, 3)) == 1 and not got  # rank 0 alone sends


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": lambda x: x}, "watch takes the model that is trained"),
        ({"scaler": torch.amp.GradScaler("cpu")}, "LossScaler('dynamic') is torch.amp.GradScaler, number for number"),
        ({"optimizer": "adam"}, "watch takes a torch optimizer"),
        ({"first_step": 0}, "first_step=0"),
        ({"sqnr_every": True}, "sqnr_every=True"),
    ],
)
def test_what_is_no_argument_is_refused(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as refused:
        fp8compile.extras.watching.watch(**{"model": chain("up"), "folder": tmp_path} | given)
    assert said in str(refused.value)


@pytest.mark.parametrize("value", [torch.ones(2), "x", None, True])
def test_log_takes_single_numbers(tmp_path: Path, value: Any) -> None:
    with (
        fp8compile.extras.watching.watch(chain("up"), folder=tmp_path) as watcher,
        pytest.raises(ValueError, match="numbers and tensors of one element"),
    ):
        watcher.log(lr=value)
