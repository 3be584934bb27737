"""The table of set-ups that were lowered without a GPU: whole models from fewer layers, and what its file holds."""

from __future__ import annotations

import json

import pytest

from benchmarks.first.lowered import ARMS, NAME, device_table, whole
from benchmarks.harness.results import FOLDER

ROWS = json.loads((FOLDER / NAME).read_text())["rows"]


def test_what_one_more_layer_adds_counts_for_each_of_the_rest() -> None:
    row = {"layers": 12, "lowered": {"2": {"us": 10.0}, "3": {"us": 14.0}}}
    assert whole(row, "us") == 10 + 10 * 4
    assert whole({"layers": 0, "lowered": {"0": {"us": 10.0}}}, "us") == 10


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['setup']} {row['arm']}")
def test_no_code_is_scattered_and_every_kernel_has_a_price(row: dict[str, object]) -> None:
    lowered: dict[str, dict[str, float]] = row["lowered"]  # type: ignore[assignment]
    assert row["arm"] in ARMS
    for found in lowered.values():
        assert found["scattered"] == found["without_price"] == 0 < found["kept"]


def test_each_set_up_stands_beside_plain_inductor() -> None:
    lines = [line for line in device_table(FOLDER) if line.startswith("| ")][2:]
    assert len(lines) == len(ROWS)
    assert {row["setup"] for row in ROWS} == {row["setup"] for row in ROWS if row["arm"] == "inductor"}
