"""Script: what the benchmarks of kernels launch on an H100, and what that costs: counts, of which times are predicted. JSON.

The calls are those that the benchmarks time (lowered_arms.py). Of an optimizer the kernel of one launch for all parameters
is costed, and a matmul that is timed alone by its operations and bytes. Peers have no price.

``python -m tests.sm90.run_kernels > benchmarks/results/kernels-sm90-lowered.json`` writes them down; names of benchmarks,
or of rows ("amax: 16384x4096"), choose some.
"""

from __future__ import annotations

import collections
import functools
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from benchmarks.harness.kernel_prices import LOWERED, PRODUCTS
from benchmarks.harness.memory import state_bytes
from benchmarks.harness.results import key_of
from benchmarks.kernels import bench_optimizer_step as steps
from benchmarks.registry import Arms, Benchmark, Case, Setting
from benchmarks.suite import BENCHMARKS
from fp8compile.optim.compiled_step import Signature

from . import fake_h100
from .externs import bytes_and_calls
from .kernel_cost import cost_of
from .lowered_arms import graphs_of, lowering_in_place_of_running, uninitialised_tensors
from .lowering import LoweredGraph
from .measures import print_json
from .optimizers import chunks_of, cost_together, lowered_chunk
from .run_layers import work

WHAT = "kernels of benchmarks lowered for sm_90 and disassembled without a GPU: counts, of which times are predicted"
SETTING = Setting(torch.device("cpu"), tiny=False, rounds=0)
UNITS = {"mm": "bf16", "addmm": "bf16", "_scaled_mm": "fp8"}
Row = dict[str, Any]


def priced(benchmark: Benchmark, case: Case) -> Iterator[Row]:
    """A row for each lap of each arm that is lowered, or is a matmul by itself."""
    found = _steps(case) if benchmark.name == "optimizer_step" else _laps(benchmark, case)
    for arm, lap, row in found:
        head = {"benchmark": benchmark.name, "case": case.name, "shape": dict(case.shape), "typical": case.typical}
        yield {**head, "arm": arm, "lap": lap, **row}


def _laps(benchmark: Benchmark, case: Case) -> Iterator[tuple[str, str, Row]]:
    assert benchmark.arms is not None, benchmark.name
    with lowering_in_place_of_running() as laps:
        with uninitialised_tensors():
            arms = benchmark.arms(case, SETTING)
        for arm, call in arms.calls.items():
            if arm.startswith(LOWERED):
                yield from ((arm, lap, row) for lap, row in _lowered(arms, arm, graphs_of(call, laps)))
            elif arm in PRODUCTS:
                laps_of_it = (key.partition("/")[2] for key in arms.work if key.startswith(f"{arm}/"))
                yield from ((arm, lap, _product(arms.least(arm, lap))) for lap in laps_of_it if lap != "backward")


def _lowered(arms: Arms, arm: str, found: dict[str, list[LoweredGraph]]) -> Iterator[tuple[str, Row]]:
    for lap, graphs in found.items():
        yield lap, {"least": dict(arms.least(arm, lap)), **costs(graphs)}


def _product(least: Any) -> Row:
    call = {"name": "matmul", "launches": 1, **least}
    return {"least": dict(least), "kernels": [], "calls": [call]}


def costs(graphs: Sequence[LoweredGraph]) -> Row:
    """Kernels and calls of a lap's graphs, or why there is no price."""
    kernels, calls = list[Row](), list[Row]()
    for graph in graphs:
        for name, launches in collections.Counter(graph.launches).items():
            cost = cost_of(graph.kernels[name])
            if cost is None:
                return {"no_price": f"{name} combines kernels, whose sizes do not stand in it"}
            kernels.append({"launches": launches, **cost.counts})
        calls += _calls(graph)
        if unknown := [call["name"] for call in calls if call["unit"] is None]:
            return {"no_price": f"nothing prices {', '.join(unknown)}"}
    return {"kernels": kernels, "calls": calls} if kernels or calls else {"no_price": "nothing was lowered"}


def _calls(graph: LoweredGraph) -> Iterator[Row]:
    """Matmuls, amaxes of weights and sums of partial sums."""
    if not graph.externs and not graph.partial_sums:
        return
    moved, calls = bytes_and_calls(graph)
    for call in calls:
        unit = UNITS.get(call.name)
        flops = work(call) if unit else 0
        yield {"name": call.name, "launches": 1, "bytes": call.num_bytes, "flops": flops, "unit": unit}
    others = {"amaxes": (graph.externs.count("torch.ops.aten._foreach_norm.Scalar"), moved - graph.num_bytes)}
    others["sums"] = (graph.partial_sums, graph.workspace_bytes)
    for name, (launches, num_bytes) in others.items():
        if launches:
            yield {"name": name, "launches": launches, "bytes": num_bytes, "flops": 0, "unit": "bf16"}


def _steps(case: Case) -> Iterator[tuple[str, str, Row]]:
    dtype = getattr(torch, case.shape["dtype"])
    shapes = collections.Counter(steps.shapes_of(case.shape["million"], steps.SHAPES))
    numel = sum(math.prod(shape) * times for shape, times in shapes.items())
    for arm in steps.builders(steps.FORMATS):
        if arm.startswith(LOWERED):
            graph, signature, of, kept = _step(arm, dtype)
            least = {"bytes": steps.least_bytes(numel, dtype, round(kept * numel)), "flops": 0, "unit": "bf16"}
            kernel = {"launches": 1, **cost_together(graph, signature, of, numel).counts}
            yield arm, "step", {"least": least, "kernels": [kernel], "calls": []}


@functools.cache
def _step(arm: str, dtype: torch.dtype) -> tuple[LoweredGraph, Signature, int, float]:
    """The step lowered for a parameter, its signature, elements, and bytes kept for each; all shapes share the signature."""
    signatures = set()
    for shape in steps.SHAPES[1:2] + steps.SHAPES[-1:]:
        with uninitialised_tensors():
            [parameter] = steps.parameters([shape], SETTING.device, dtype)
        optimizer: Any = steps.builders(steps.FORMATS)[arm]([parameter])
        chunks, _ = chunks_of(optimizer)
        signatures |= {signature for signature, _ in chunks}
        if parameter.dim() == 2:
            [chunk], made = chunks, (parameter.numel(), state_bytes(optimizer) / parameter.numel())
    assert len(signatures) == 1, f"{arm}: shapes have kernels of their own"
    return lowered_chunk(chunk)[0], chunk[0], *made


def report(names: Iterable[str]) -> dict[str, Any]:
    """``{"what", "versions", "rows"}``; no names: every benchmark of kernels."""
    fake_h100.install()
    chosen, rows = set(names), list[Row]()
    for benchmark in (b for b in BENCHMARKS if b.part == "kernels"):
        for case in benchmark.cases:
            if not chosen or chosen & {benchmark.name, key_of(benchmark.name, case.name)}:
                print(key_of(benchmark.name, case.name), flush=True)
                rows += priced(benchmark, case)
    return {"what": WHAT, "versions": {**fake_h100.installed(), "target": "sm_90 (mocked)"}, "rows": rows}


if __name__ == "__main__":
    print_json(lambda: report(sys.argv[1:]))
