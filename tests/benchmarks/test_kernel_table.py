"""The table of kernels: made of results alone, and nothing that was benchmarked or lowered is missing in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import kernel_table, suite
from benchmarks.first import readings
from benchmarks.harness import kernel_lines, kernel_prices, kernel_reads
from benchmarks.harness.kernel_prices import LOWERED, PRODUCTS, price
from benchmarks.harness.kernel_reads import Measured
from benchmarks.harness.kernel_time import BYTES, LANES, LAUNCH
from benchmarks.harness.results import FOLDER, Results

PRICED: list[dict[str, Any]] = json.loads((FOLDER / kernel_table.PRICES).read_text())["rows"]
BENCHMARKS = [b for b in suite.BENCHMARKS if b.part == "kernels"]
BIG = {"launches": 1, "num_bytes": 420_000_000, "issued": 1e6, "slow_issued": 0, "elements": 10**6}
KERNEL = {**BIG, "registers": 32, "warps": 64.0, "spilled": 0}


def a_row(**other: Any) -> dict[str, Any]:
    """A made-up row of counts: 100 µs of bytes."""
    row = {"benchmark": "amax", "case": "16384x4096", "typical": True, "arm": "ours", "lap": "amax", "shape": {}}
    row |= {"least": {"bytes": 420_000_000}, "kernels": [KERNEL], "calls": []}
    return {**row, **other}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


# ---------------------------------------------------------------------------------------------------------- contract


def test_every_shape_of_every_benchmark_of_kernels_has_a_price() -> None:
    declared = {(b.name, case.name, case.typical) for b in BENCHMARKS for case in b.cases}
    assert declared == {(row["benchmark"], row["case"], row["typical"]) for row in PRICED}
    for b in BENCHMARKS:
        assert [case.typical for case in b.cases].count(True) >= 1 and b.arms is not None
        assert any(row["benchmark"] == b.name and row["arm"].startswith("ours") for row in PRICED)


def test_every_arm_that_is_compiled_or_a_product_has_a_price() -> None:
    for b in BENCHMARKS:
        named = {arm for arm in b.compared_with if arm.startswith(LOWERED) or arm in PRODUCTS}
        assert named <= {row["arm"] for row in PRICED if row["benchmark"] == b.name}


def test_each_kernel_is_priced_and_none_spills() -> None:
    assert [row for row in PRICED if (found := price(row)) is None or found.spilled] == []


def test_the_least_is_no_more_than_what_is_moved() -> None:
    """Within a hundredth: scales and weights of norms are not counted. What amaxes read again is no least."""
    for row in PRICED:
        found = price(row)
        assert found is not None and found.num_bytes >= 0.99 * row["least"]["bytes"], row


# ------------------------------------------------------------------------------------------------------------ prices


def test_a_price_is_its_kernels_calls_and_launches() -> None:
    call = {"name": "mm", "launches": 1, "bytes": 0, "flops": 762e6, "unit": "bf16"}  # 1 µs of what an H200 reaches
    found = price(a_row(kernels=[KERNEL, {**KERNEL, "launches": 2, "num_bytes": 0, "issued": 0}], calls=[call]))
    assert found is not None and found.launches == 4 and found.bound == "bytes"
    assert found.us == pytest.approx(420_000_000 / BYTES * 1e6 + 4 * LAUNCH + 1, rel=1e-3)
    assert found.instructions == 1.0 and found.num_bytes == 420_000_000


@pytest.mark.parametrize(
    ("counts", "bound"),
    [
        ({"issued": LANES / 1e3}, "instructions"),
        ({"slow_issued": 1e10}, "slow pipe"),
        ({"warps": 4.0}, "bytes, few warps"),
        ({"num_bytes": 0, "launches": 5}, "launch"),
    ],
)
def test_a_bound_is_what_most_of_the_time_goes_to(counts: dict[str, Any], bound: str) -> None:
    found = price(a_row(kernels=[{**KERNEL, **counts}]))
    assert found is not None and found.bound == bound


def test_rates_of_the_card_are_those_that_were_read() -> None:
    [reading] = [each for each in readings.readings(FOLDER) if each.commit == "34b1c85"]
    card = kernel_reads.read("", "", reading.found, PRICED).rows["amax: 16384x4096"]["rates"]
    assert pytest.approx(card, rel=0.01) == kernel_prices.CARD  # a copy's in two digits


# ------------------------------------------------------------------------------------------------------------- lines


def test_without_a_gpu_there_are_predictions_alone() -> None:
    head, _, line = kernel_lines.lines([a_row()], None, whole=False)
    assert cells(head)[2:] == list(kernel_lines.PREDICTED)
    assert cells(line) == [
        *("amax 16384x4096, amax", "ours", "420", "1", "32", "0", "1", "103", "4,094 GB/s", "97 %", "bytes")
    ]


def test_what_spills_or_has_no_price_is_shown() -> None:
    """The one that spills is not the last."""
    spills = a_row(kernels=[{**KERNEL, "spilled": 40}, KERNEL])
    first, second = kernel_lines.lines([spills, a_row(no_price="it combines kernels")], None, whole=False)[2:]
    assert cells(first)[5] == "**40**" and cells(second)[2] == "**no price: it combines kernels**"


def test_shapes_that_are_not_typical_stand_in_the_whole_table() -> None:
    rows = [a_row(), a_row(case="8x8", typical=False)]
    assert [len(kernel_lines.lines(rows, None, whole)) for whole in (False, True)] == [3, 4]


def measured(**other: Any) -> Measured:
    """Made up: no figure in it was measured."""
    arms = {"ours": {"amax": {"seconds": 2e-4}}, "eager": {"amax": {"seconds": 3e-4}}}
    rates = {"copy": 4.2e12, "bf16": 8e14}
    row = {"arms": arms, "left_out": {"liger": "not installed (pip install liger-kernel)"}, "rates": rates}
    return Measured("a card", {"amax: 16384x4096": {**row, **other}})


def test_what_was_measured_stands_beside_its_prediction_and_its_peers() -> None:
    head, _, line, _, *notes = kernel_lines.lines([a_row()], measured(), whole=False)
    assert cells(head)[11:] == [*kernel_lines.MEASURED, "torch"]
    assert cells(line)[11:] == ["200", "2,100 GB/s", "50 %", "0.51", "300"]
    assert notes[0].startswith("- Generated kernels: off by 67 % (1 read), ")  # log(102.6 / 200) = -0.67
    assert notes[1] == "- liger: not installed (pip install liger-kernel)"
    assert notes[2:] == [f"- {name}: not timed there" for name in ("Inductor", "torchao", "FlashOptim")]


def test_what_was_measured_and_not_lowered_is_shown() -> None:
    line = kernel_lines.lines([], measured(), whole=False)[2]
    assert cells(line)[2] == "**no price: not lowered**" and cells(line)[11] == "200"


def test_a_row_that_failed_is_named() -> None:
    failed = Measured("a card", {"amax: 8x8": {"error": "out of memory"}})
    assert "- amax: 8x8: out of memory" in kernel_lines.lines([a_row()], failed, whole=False)


# ---------------------------------------------------------------------------------------------------- what was read

CALLS = {"ms": 4.0, "min_ms": 3.5, "max_ms": 5.0, "enqueue_ms": 2.0, "n": 10}
FACTS: list[dict[str, Any]] = [
    {"job": "env", "what": "copy", "gb_s": 4000},
    {"job": "env", "what": "bf16 matmul", "tflops": 800},
    {"job": "kernels", "what": "kernel amax", **CALLS, "min_ms": 0.05, "max_ms": 0.09, "enqueue_ms": 0.02},
    {"job": "kernels", "what": "matmul 8x4x2 TFLOP/s", "bf16": 0.5, "fp8 slow": "no such kernel"},
    {"job": "opt-4bit_log", "what": "optimizer", **CALLS},
    {"job": "opt-ao_fp8", "what": "optimizer", **CALLS, "min_ms": 11.5, "enqueue_ms": 13.0},
    {"job": "opt-flash", "what": "optimizer", **CALLS, "min_ms": 2.0, "max_ms": 40.0, "enqueue_ms": 5.0},
]
LINEAR = a_row(benchmark="linear", case="small", shape={"M": 8, "K": 4, "N": 2})


def test_facts_are_read_as_rows_of_benchmarks() -> None:
    found = kernel_reads.read("a card", "34b1c85", FACTS, [LINEAR])
    assert found.lap("amax", "16384x4096", "ours", "amax")["seconds"] == pytest.approx(5e-5)
    assert found.lap("linear", "small", "bf16 products", "forward")["seconds"] == pytest.approx(128 / 0.5e12)
    assert not found.lap("linear", "small", "fp8 products", "forward")
    steps = found.rows["optimizer_step: 256M bfloat16"]["arms"]
    times = {arm: (laps["step"]["seconds"] * 1e3, laps["step"]["host_bound"]) for arm, laps in steps.items()}
    assert times == {"ours 4bit_log": (3.5, False), "torchao fp8": (11.5, True), "flashoptim": (2.0, False)}
    assert found.reached("amax", "16384x4096") == {"copy": 4e12, "bf16": 8e14}


def test_of_a_kernel_that_was_rewritten_since_no_error_is_given() -> None:
    step = a_row(benchmark="optimizer_step", case="256M bfloat16", arm="ours 4bit_log", lap="step")
    shown = {}
    for commit in ("34b1c85", "later"):
        found = kernel_reads.read("a card", commit, FACTS, [])
        shown[commit] = cells(kernel_lines.lines([step], found, whole=False)[2])
    assert shown["34b1c85"][14] == kernel_lines.OTHER_KERNEL and shown["later"][14] == "0.03"
    assert shown["later"][15:] == ["≤ 11,500", "2,000"]


def test_of_a_time_that_the_host_drew_out_no_error_is_given() -> None:
    slow = [{**fact, "enqueue_ms": 0.08} if fact["what"] == "kernel amax" else fact for fact in FACTS]
    for facts, us, ratio in ((FACTS, "50.0", "2.05"), (slow, "≤ 50.0", "")):
        lines = kernel_lines.lines([a_row()], kernel_reads.read("a card", "", facts, []), whole=False)
        assert (cells(lines[2])[11], cells(lines[2])[14]) == (us, ratio)
        assert any("off by" in line for line in lines) == bool(ratio)


def test_what_an_h200_told_is_found() -> None:
    """Four of codecs, a cast, an amax, two of each of four matmuls; optimizers of ours were other ones."""
    found = kernel_table.on_gpu(FOLDER, PRICED)
    assert found is not None and "NVIDIA H200" in found.where and "34b1c85" in found.where
    read = [row for row in PRICED if found.lap(row["benchmark"], row["case"], row["arm"], row["lap"])]
    kinds = [row["benchmark"] for row in read]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        **{"optimizer_step": 4, "group_codecs": 4, "cast_transpose": 1, "amax": 1, "linear": 8},
    }


# ----------------------------------------------------------------------------------------------------------- command


def test_the_command_prints_predictions(capsys: pytest.CaptureFixture[str]) -> None:
    assert kernel_table.main(["amax", "gelu"]) == 0
    text = capsys.readouterr().out
    assert "Predicted for an H200 from code lowered by torch" in text and "read µs" not in text
    assert "| amax 16384x4096, amax | ours |" in text and "| gelu 16384x16384, backward | inductor |" in text
    assert "group_codecs" not in text


def test_the_command_measures_toy_shapes_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")  # of the worker: the command is tried, not the compiler
    assert kernel_table.main(["amax", "--device", "cpu", "--tiny", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "| amax 32x64, amax | ours | **no price: not lowered**" in text and "read µs" in text
    assert "no figure here says anything about speed" in text
    [path] = tmp_path.glob("*.json")
    assert Results.read(path).rows.keys() == {"amax: 32x64"}


def test_the_command_knows_its_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        kernel_table.main(["amx"])
    assert "there is no benchmark 'amx' of kernels" in capsys.readouterr().err
