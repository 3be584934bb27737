"""The same numbers to other places, by stand-ins of their packages: what each is called with, and what it cannot break."""

from __future__ import annotations

import contextvars
import logging
import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import fp8compile
from fp8compile.extras.watching.sends import Sends
from tests.support.written import batch, chain, loss_of, sgd, steps_of

Calls = list[tuple[Any, ...]]
RECORD = {"step": 7, "time": 1.0, "loss": math.nan, "scale": 2.0, "nearest": "up", "sqnr": {"exp_avg": 31.0}}
NUMBERS = {"loss": math.nan, "scale": 2.0, "sqnr/exp_avg": 31.0}


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **held: Any) -> None:
    module = types.ModuleType(name)
    for key, value in held.items():
        setattr(module, key, value)
    monkeypatch.setitem(sys.modules, name, module)


def same(found: Any, expected: Any) -> bool:
    return repr(found) == repr(expected)  # a NaN is the same as a NaN


def test_tensorboard_gets_scalars_in_the_folder_of_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: Calls = []

    class Writer:
        def __init__(self, folder: str) -> None:
            calls.append((folder,))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            calls.append((name, value, step))

    stand_in(monkeypatch, "torch.utils.tensorboard", SummaryWriter=Writer)
    Sends(["tensorboard"], tmp_path).send(RECORD)
    assert same(calls, [(str(tmp_path),), *((name, value, 7) for name, value in NUMBERS.items())])


def test_wandb_gets_the_step_beside_the_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: Calls = []
    stand_in(monkeypatch, "wandb", run=object(), log=lambda numbers: calls.append((numbers,)))
    Sends(["wandb"], tmp_path).send(RECORD)
    assert same(calls, [({"train_step": 7, **NUMBERS},)])


def test_trackio_gets_the_step_beside_the_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: Calls = []
    current = contextvars.ContextVar[Any]("current_run", default="a run")
    held = types.SimpleNamespace(current_run=current)
    stand_in(monkeypatch, "trackio", context_vars=held, log=lambda numbers: calls.append((numbers,)))
    Sends(["trackio"], tmp_path).send(RECORD)
    assert same(calls, [({"train_step": 7, **NUMBERS},)])


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_place_without_a_run_says_what_to_call(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    current = contextvars.ContextVar[Any]("current_run", default=None)
    stand_in(monkeypatch, name, run=None, context_vars=types.SimpleNamespace(current_run=current))
    with pytest.raises(ValueError, match=rf"{name}\.init\(\.\.\.\) before"):
        Sends([name], tmp_path)


@pytest.mark.parametrize(("name", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_a_package_that_is_missing_is_named(
    name: str, module: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # its import fails
    with pytest.raises(ImportError, match=f"pip install {name}"):
        fp8compile.extras.watching.watch(chain("up"), folder=tmp_path, to=[name])


def test_a_name_that_is_not_known_has_a_neighbour(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Did you mean 'tensorboard'"):
        Sends(["tensorbord"], tmp_path)


def test_one_that_fails_is_left_out_and_the_others_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    got: Calls = []

    def broken(step: int, numbers: Any) -> None:
        raise OSError("no network")

    model = chain("up")
    optimizer = sgd(model)
    to = [broken, lambda step, numbers: got.append((step, numbers))]
    with (
        caplog.at_level(logging.WARNING, "fp8compile"),
        fp8compile.extras.watching.watch(model, None, optimizer, tmp_path, to=to) as watcher,
    ):
        for step in range(1, 4):
            loss_of(model, batch(step)).backward()
            optimizer.step()
            watcher.log(loss=step / 4, tokens=5)
    assert [(step, numbers["loss"], numbers["tokens"]) for step, numbers in got] == [(n, n / 4, 5) for n in (1, 2, 3)]
    assert [step["loss"] for step in steps_of(tmp_path)] == [0.25, 0.5, 0.75]
    assert ["broken (OSError: no network)" in record.getMessage() for record in caplog.records] == [True]
    assert watcher.scalars() == got[-1][1]
