"""The file of a run: strict JSON, line by line, behind what stands there; a disk that is full ends no training."""

from __future__ import annotations

import json
import logging
import math
import os
from pathlib import Path

import pytest

from fp8compile.extras.watching import run_file
from fp8compile.extras.watching.lines import line_of_step, scalars_of
from fp8compile.extras.watching.run_file import RunFile
from tests.support.written import lines_of, text_of

NASTY = "</script><img src=x onerror=window.bad=1>\"'&\u2028\n\ud800"


def test_what_json_has_not_is_a_word() -> None:
    record = {"step": 1, "loss": math.nan, "scale": math.inf, "sqnr": {"exp_avg": -math.inf, "exp_avg_sq": 3.0}}
    line = line_of_step(record)
    assert json.loads(line, parse_constant=pytest.fail) == {
        "step": 1,
        "loss": None,
        "scale": None,
        "sqnr": {"exp_avg": None, "exp_avg_sq": 3.0},
        "words": {"loss": "nan", "scale": "inf", "sqnr.exp_avg": "-inf"},
    }


@pytest.mark.parametrize("value", [1 / 3, 1e300, -1.2345678912e-30, 2.0**-24, 0.0])
def test_seven_digits_are_kept(value: float) -> None:
    """Half a unit of the seventh digit is at most 0.5e-6 of the number."""
    assert json.loads(line_of_step({"loss": value}))["loss"] == pytest.approx(value, rel=0.5e-6, abs=0)


def test_counts_are_exact() -> None:
    assert json.loads(line_of_step({"step": 123456789, "memory": 2**45 + 1})) == {
        "step": 123456789,
        "memory": 2**45 + 1,
    }


def test_any_text_is_one_line(tmp_path: Path) -> None:
    file = RunFile(tmp_path, 3)
    file.begin({"schema": NASTY})
    file.add({"step": 1, "nearest": NASTY})
    file.close()
    assert [line.get("schema") or line["nearest"] for line in lines_of(tmp_path, 3)] == [NASTY] * 2


def test_a_line_that_was_cut_off_is_ended_first(tmp_path: Path) -> None:
    (tmp_path / "rank0.jsonl").write_text('{"step":1}\n{"st')
    file = RunFile(tmp_path, 0)
    file.begin({"schema": "s"})
    file.close()
    assert text_of(tmp_path) == '{"step":1}\n{"st\n{"schema":"s"}\n'


def test_a_full_disk_is_said_once_and_the_next_line_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = RunFile(tmp_path, 0)
    file.begin({"schema": "s"})
    real, room = os.write, [4, 0]

    def full(to: int, data: bytes) -> int:
        return real(to, data[: room.pop(0)]) if room else real(to, data)

    with caplog.at_level(logging.WARNING, "fp8compile"):
        monkeypatch.setattr(run_file.os, "write", full)
        for step in (1, 2, 3):
            file.add({"step": step})
        monkeypatch.undo()
    file.close()
    assert text_of(tmp_path) == '{"schema":"s"}\n{"st\n{"step":3}\n'
    assert ["is the disk full?" in record.getMessage() for record in caplog.records] == [True]


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    file = RunFile(tmp_path / "file", 0)
    with caplog.at_level(logging.WARNING, "fp8compile"):
        file.begin({"schema": "s"})
        file.add({"step": 1})
    file.close()
    assert [record.getMessage().startswith("cannot write") for record in caplog.records] == [True]


def test_numbers_by_name() -> None:
    record = {"step": 1, "time": 5.0, "loss": 2.0, "skipped": True, "nearest": "up", "sqnr": {"exp_avg": 30.5}}
    assert scalars_of(record) == {"loss": 2.0, "skipped": 1.0, "sqnr/exp_avg": 30.5}
