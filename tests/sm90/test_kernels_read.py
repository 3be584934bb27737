"""The prediction of a kernel's time against kernels whose times an H200 told. Nothing is compiled."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from typing import Any

import pytest

from benchmarks.harness import kernel_time
from benchmarks.harness.kernel_time import error, totals
from benchmarks.studies.kernels_read import Wrapper
from tests.support.sources import ROOT

from .kernel_cost import warps_held

ROWS: list[dict[str, Any]] = json.loads((ROOT / "benchmarks/results/kernels-h200-read.json").read_text())["rows"]
CONSTANTS = ("LANES", "WARPS")


def test_kernels_take_what_is_predicted() -> None:
    assert len(ROWS) == 100 and error(ROWS) < 0.18
    mine, told = totals(ROWS)
    assert mine == pytest.approx(told, rel=0.02)


def test_each_run_takes_what_is_predicted_within_a_fifth() -> None:
    runs = defaultdict(list)
    for row in ROWS:
        runs[row["run"]].append(row)
    assert len(runs) == 6
    for run, rows in runs.items():
        mine, told = totals(rows)
        assert mine == pytest.approx(told, rel=0.21), run


@pytest.mark.parametrize("name", CONSTANTS)
@pytest.mark.parametrize("factor", [0.8, 1.25])
def test_constants_are_those_that_fit(name: str, factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them, a fifth off, would predict what was read by more than half a hundredth better."""
    before = error(ROWS)
    monkeypatch.setattr(kernel_time, name, getattr(kernel_time, name) * factor)
    assert error(ROWS) > before - 0.005


def test_each_part_of_the_prediction_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates that the card's data sheet allows, and warps that do not matter, are off by half."""
    monkeypatch.setattr(kernel_time, "WARPS", 1)
    monkeypatch.setattr(kernel_time, "LANES", 3.3e13)
    assert error(ROWS) > 0.3
    monkeypatch.setattr(kernel_time, "LANES", math.inf)
    assert error(ROWS) > 0.5


@pytest.mark.parametrize(
    ("programs", "num_warps", "registers", "shared", "held"),
    [
        (10**6, 4, 32, 0, 64),  # 64 warps are the most
        (10**6, 8, 124, 0, 16),  # registers go in steps of eight: 65,536 / (128 * 32 * 8) programs
        (10**6, 4, 32, 60_000, 12),  # shared memory for three programs
        (10**6, 1, 16, 0, 32),  # 32 programs are the most
        (24, 4, 54, 0, 4),  # fewer programs than multiprocessors
        (264, 4, 54, 0, 8),  # two each
    ],
)
def test_warps_are_those_that_registers_shared_memory_and_programs_allow(
    programs: int, num_warps: int, registers: int, shared: int, held: int
) -> None:
    assert warps_held(programs, num_warps, registers, shared) == held


GENERATED = """
triton_poi_fused_0 = async_compile.triton('triton_poi_fused_0', '''
    triton_meta={'signature': {'in_ptr0': '*bf16', 'in_out_ptr0': '*fp32', 'out_ptr0': '*i8', 'xnumel': 'i32'}, 'device': 0}
    tmp0 = tl.load(in_ptr0 + (x0), xmask)
    tmp1 = tl.load(in_out_ptr0 + (x0), xmask)
    tl.store(in_out_ptr0 + (x0), tmp1, xmask)
    tl.store(out_ptr0 + (x0), tmp1, xmask)
''', device_str='cuda')
        assert_size_stride(primals_1, (4, 8), (8, 1))
            buf0 = empty_strided_cuda((4, 8), (8, 1), torch.float32)
            buf1 = buf0; del buf0  # reuse
            buf2 = empty_strided_cuda((32, ), (1, ), torch.int8)
            triton_poi_fused_0.run(primals_1, buf1, buf2, 32, stream=stream0)
            triton_poi_fused_0.run({0}, buf1, buf2, 32, stream=stream0)
"""


def test_a_wrapper_tells_what_its_kernels_move() -> None:
    wrapper = Wrapper(GENERATED.replace("{0}", "primals_1"))
    [kernel] = wrapper.kernels
    assert len(wrapper.launches(kernel.name)) == 2
    assert wrapper.bytes_of(kernel) == 32 * (2 + 4 + 4 + 1)


def test_a_buffer_of_unknown_size_leaves_a_kernel_out() -> None:
    wrapper = Wrapper(GENERATED.replace("assert_size_stride(primals_1", "assert_size_stride(primals_2"))
    [kernel] = wrapper.kernels
    assert wrapper.bytes_of(kernel) == 0
