"""Lowered for an H100: what benchmarks of kernels launch. The file of prices is what its script makes. No GPU was asked."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton, which compiles what Inductor generates, exists for Linux only")

from benchmarks.harness.kernel_time import KernelCost
from tests.support.sources import ROOT

from .fake_h100 import MADE_FOR, installed
from .kernel_cost import chosen
from .lowered_arms import Laps
from .lowering import LoweredGraph
from .subprocesses import result_of

LOWERED = ("amax: 16384x4096", "group_codecs: 16384x4096 int8")


def lowered() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = result_of("run_kernels", *LOWERED)["rows"]
    return rows


def test_prices_are_what_the_script_makes() -> None:
    if installed() != MADE_FOR:
        pytest.skip("other versions of torch and Triton generate other kernels")
    kept = json.loads((ROOT / "benchmarks/results/kernels-sm90-lowered.json").read_text())["rows"]
    assert lowered() == [row for row in kept if f"{row['benchmark']}: {row['case']}" in LOWERED]


def test_no_kernel_spills() -> None:
    kernels = [kernel for row in lowered() for kernel in row["kernels"]]
    assert len(kernels) >= 7 and not any(kernel["spilled"] for kernel in kernels)


def test_laps_have_the_kernels_that_run_in_them() -> None:
    """An amax is three launches in ours; encode and decode are one each, and move x, its codes and scales."""
    rows = {(row["benchmark"], row["arm"], row["lap"]): row["kernels"] for row in lowered()}
    assert len(rows["amax", "ours", "amax"]) == 3
    moved = 16384 * 4096 * (2 + 1) + 2 * 16384 * 4096 // 128
    for lap in ("encode", "decode"):
        assert [kernel["num_bytes"] for kernel in rows["group_codecs", "ours", lap]] == [moved]


def test_a_configuration_that_spills_is_chosen_only_where_all_do() -> None:
    fast, slow = (KernelCost(num_bytes, 1.0, 0.0, 1, 255, 64.0, "", 40) for num_bytes in (10**8, 10**9))
    whole = dataclasses.replace(slow, spilled=0)
    assert chosen([fast, slow, whole]) == whole and chosen([slow, fast]) == fast


def test_a_graph_belongs_to_the_lap_that_ends_next() -> None:
    laps, first, second = Laps(), LoweredGraph(), LoweredGraph()
    for graph in (first, second, second):
        laps.ran(graph)
        laps("one" if graph is first else "two")
    assert laps.graphs == {"one": [first], "two": [second, second]}
