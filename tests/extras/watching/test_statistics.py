"""What a step's line says of observed values: the layer in which an inf began, how many there were, in the right step."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from fp8compile.amp import LossScaler
from fp8compile.amp import watch as hooks
from fp8compile.extras.watching.statistics import MOST_LISTED, MOST_LOOKED_AT, NOT_OURS, NOT_TAKEN, Statistics
from fp8compile.observe import records
from fp8compile.observe.records import Observations, StatisticsRow
from tests.support.written import batch, chain, lines_of, loss_of, sgd, steps_of


def train(folder: Path, model: nn.Module, scaler: LossScaler | None, given: bool = True, spoil: int = 3) -> None:
    """Five steps; in step ``spoil`` the loss is so large that its gradient in FP16 is inf."""
    optimizer = sgd(model)
    with fp8compile.extras.watching.watch(model, scaler if given else None, optimizer, folder) as watcher:
        for step in range(1, 6):
            loss = loss_of(model, batch(step), 1e9 if step == spoil else 1.0)
            (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is None:
                if step == spoil:
                    model.zero_grad()
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
            watcher.log(loss=loss)


def test_an_eager_model_without_a_scaler_has_its_statistics(tmp_path: Path) -> None:
    model = chain("up", "down")
    hooks(model)
    train(tmp_path, model, None)
    steps = steps_of(tmp_path)
    assert [("headroom" in step, "overflow" in step) for step in steps] == [(True, n == 3) for n in range(1, 6)]
    assert "step 3: down (backward) Linear: inf in 32 of 32 f16 values" in steps[2]["overflow"]["line"]


def test_the_headroom_is_that_of_the_nearest_value(tmp_path: Path) -> None:
    model, seen = chain("up"), list[float]()
    model.up.register_forward_hook(lambda _, __, out: seen.append(float(out.detach().abs().max())))
    hooks(model, modules=("up",), kinds=("weight",))
    with torch.no_grad():
        model.up.weight.mul_(1000)  # so that the forward is nearer than gradients
    train(tmp_path, model, None, spoil=9)
    expected = [math.log2(65504 / amax) for amax in seen]
    assert [step["headroom"] for step in steps_of(tmp_path)] == pytest.approx(expected, abs=1e-6)
    assert {step["nearest"] for step in steps_of(tmp_path)} == {"up forward Linear"}


def test_with_a_scaler_the_step_that_was_skipped_names_the_layer(tmp_path: Path) -> None:
    model = chain("up", "down")
    hooks(model)
    train(tmp_path, model, LossScaler("dynamic", init_scale=4.0))
    steps = steps_of(tmp_path)
    assert [step["skipped"] for step in steps] == [False, False, True, False, False]
    assert [step["scale"] for step in steps] == [4, 4, 2, 2, 2]
    assert [n for n, step in enumerate(steps, 1) if "overflow" in step] == [3]
    assert steps[2]["overflow"]["layers"][0]["module"] == "down"


def test_a_scaler_that_is_not_enabled_is_as_none(tmp_path: Path) -> None:
    model = chain("up", "down")
    train(tmp_path, model, LossScaler("dynamic", enabled=False), spoil=9)
    assert [step["step"] for step in steps_of(tmp_path)] == [1, 2, 3, 4, 5]
    assert lines_of(tmp_path)[0]["scaler"] is None


def test_statistics_of_a_scaler_that_was_not_given_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its steps end later than the optimizer's, so that they would stand in the line of the step behind."""
    model = chain("up", "down")
    hooks(model)
    with caplog.at_level(logging.WARNING, "fp8compile"):
        train(tmp_path, model, LossScaler("dynamic", init_scale=4.0), given=False)
    steps = steps_of(tmp_path)
    assert not any("headroom" in step or "overflow" in step for step in steps)
    assert [NOT_OURS in step.get("remark", "") for step in steps] == [True, False, False, False]  # one was skipped
    assert sum(NOT_OURS in record.getMessage() for record in caplog.records) == 1


def test_without_statistics_it_says_how_to_have_them(tmp_path: Path) -> None:
    train(tmp_path, chain("up", "down"), LossScaler("dynamic", init_scale=4.0))
    (line,) = [step["overflow"]["line"] for step in steps_of(tmp_path) if "overflow" in step]
    assert line == f"step 3: inf or NaN in the gradients, so the step was skipped; layer not known: {NOT_TAKEN}"


class ByHand(Observations):
    """Observations of rows ``r0, r1, ...``, one module each."""

    def __init__(self, count: int, parameter: Tensor) -> None:
        rows = [StatisticsRow(f"r{n}", "", "mm", "activation", "forward", "f16") for n in range(count)]
        super().__init__(rows, parameter.device, [parameter])

    def spoilt(self, which: list[int]) -> None:
        self.current[which, records.INF] = 1
        self.close()


def read(model: nn.Module, several: list[ByHand], which: list[int]) -> dict[str, Any]:
    statistics = Statistics(model)
    for each in several:
        each.spoilt(which)
    return statistics.read(1, statistics.collect())


def test_all_that_overflowed_is_counted_and_the_first_are_listed() -> None:
    model = chain("up")
    count = 2 * MOST_LOOKED_AT + 1
    several = [ByHand(count, model.up.weight) for _ in range(2)]
    found = read(model, several, list(range(count)))["overflow"]
    assert found["count"] == 2 * count
    assert [layer["module"] for layer in found["layers"]] == [f"r{n}" for n in range(MOST_LISTED)]
    assert found["line"].startswith("step 1: r0 (forward)")


def test_a_mask_of_inf_among_the_data_is_no_headroom_of_zero(tmp_path: Path) -> None:
    model = chain("up")
    seen = hooks(model)
    loss_of(model, batch(1)).backward()
    data = [row.kind for row in seen.rows].index("data")
    seen.current[data, records.INF] = 3
    statistics = Statistics(model)
    seen.close()
    assert statistics.read(1, statistics.collect())["headroom"] > 0


def test_what_overflows_in_a_step_that_another_scaler_skips_stands_in_the_next_line(tmp_path: Path) -> None:
    """As ``torch.amp.GradScaler`` does: the optimizer's step is not called, and nothing tells of it."""
    model = chain("up", "down")
    hooks(model)
    optimizer = sgd(model)
    with fp8compile.extras.watching.watch(model, None, optimizer, tmp_path):
        for skipped in (False, True, False, False):
            loss_of(model, batch(1), 1e9 if skipped else 1.0).backward()
            if not skipped:
                optimizer.step()
            optimizer.zero_grad()
    assert ["overflow" in step for step in steps_of(tmp_path)] == [False, True, False]
