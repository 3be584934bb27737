"""What the generated kernels of a layer are predicted to take on an H200, from code lowered and disassembled. No GPU.

A kernel takes a launch and the longest of its bytes, its instructions and the slow ones among them, as predicted by
benchmarks/harness/kernel_time.py; of 100 kernels whose times an H200 told it is within 18 % (kernels_read.py). Calls of
libraries for amaxes of weights count by their bytes; attention and the sums of partial sums are not in it. "bytes" is what
bytes alone would take at a copy's rate, "matmuls" what matmuls take at the rates that an H200 reached. ``linears="auto"``
goes by what linears add here (fp8compile/cost/linear_cost.py): in "linears" rows nothing is made again to save memory.

python benchmarks/studies/layer_instructions.py [--json FILE] [--kernels N] [--pipelines NAME ...] ["vit 16k" ...]

``--pipelines``: of these alone; rows of others that are in the file stay.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.kernel_time import BYTES, LAUNCH, KernelCost
from benchmarks.harness.output import write_json
from fp8compile.cost.device_rates import RATES
from tests.sm90 import fake_h100
from tests.sm90.externs import ExternCall, bytes_and_calls
from tests.sm90.kernel_cost import cost_of
from tests.sm90.layers import (
    ALL_CODES,
    BOTH,
    CACHED,
    CASES,
    DEFAULT,
    DELAYED,
    LINEARS,
    LINEARS_CACHED,
    PLAIN,
    RECIPES,
    SPEED,
    STORAGE,
    STORAGE_SPEED,
    STORAGE_WORTH,
)
from tests.sm90.lowering import Backend, LoweredGraph
from tests.sm90.run_layers import backend_of, lowered_layer, work
from tests.sm90.run_model import fp8compile_backend
from tests.sm90.run_setups import kept

KEPT, H200 = 8, RATES["h200"]
NOTHING_MADE_AGAIN = {"saved.max_cost": 0.0, "debug.device_rates": "h200"}
MATMULS = {"mm": H200.bf16, "addmm": H200.bf16, "_scaled_mm": H200.fp8}  # TFLOP/s
LAYERS = ("vit 16k", "bert 16k", "llama 16k")
NAMES = {
    PLAIN: "plain Inductor",
    STORAGE: "storage alone",
    STORAGE_WORTH: "storage alone, `max_cost=1`",
    STORAGE_SPEED: "storage alone, `speed`",
    LINEARS: "linears alone",
    DEFAULT: "default",
    ALL_CODES: 'default, `max_cost="any"`',
    SPEED: "`speed`",
    BOTH: "storage and all linears",
    LINEARS_CACHED: "linears, cached weights",
    DELAYED: "linears, delayed",
    CACHED: "linears, delayed, cached weights",
}


def kernels_of(graphs: Sequence[LoweredGraph]) -> list[tuple[str, int, KernelCost]]:
    """``(name, launches, cost)`` of a layer's kernels, the most expensive first."""
    found = []
    for half, graph in zip(("forward", "backward"), graphs, strict=True):
        for name, times in collections.Counter(graph.launches).items():
            cost = cost_of(graph.kernels[name])
            assert cost, f"{name} combines kernels, which are not costed"
            found.append((f"{half} {name}", times, cost))
    return sorted(found, key=lambda each: -each[1] * each[2].us)


def matmuls_us(calls: Iterable[ExternCall]) -> float:
    """What the matmuls among a half's calls take, by their operations or their bytes."""
    matmuls = (call for call in calls if call.name in MATMULS)
    return sum(H200.microseconds(work(call), MATMULS[call.name], call.num_bytes) for call in matmuls)


def _backend(pipeline: str) -> Backend:
    recipe = RECIPES.get(pipeline)
    if recipe is None or recipe.saved.format != "off":
        return backend_of(pipeline)
    return fp8compile_backend(recipe.changed(NOTHING_MADE_AGAIN))


def row_of(case: str, pipeline: str) -> dict[str, Any]:
    """A layer's totals: microseconds of kernels and of calls for amaxes, launches, those calls, partial sums outside."""
    graphs = lowered_layer(CASES[case], _backend(pipeline))
    kernels = kernels_of(graphs)
    calls = sum(call.startswith("torch.ops.aten._foreach_norm") for graph in graphs for call in graph.externs)
    counted = [bytes_and_calls(graph) for graph in graphs]
    called_us = sum(both - graph.num_bytes for (both, _), graph in zip(counted, graphs, strict=True)) / BYTES * 1e6
    row: dict[str, Any] = {"layer": case, "pipeline": NAMES[pipeline]}
    row["launches"] = sum(len(graph.launches) for graph in graphs) + calls
    row["us"] = sum(times * cost.us for _, times, cost in kernels) + called_us + calls * LAUNCH
    row["bytes_us"] = sum(times * cost.by_resource["bytes_us"] for _, times, cost in kernels) + called_us
    row["matmuls_us"] = sum(matmuls_us(of_half) for _, of_half in counted)
    row["kept"] = kept(graphs, (CASES[case].batch, CASES[case].seq, CASES[case].hidden))
    row["partial_sums"] = sum(graph.partial_sums for graph in graphs)
    named = [{"kernel": name, "times": times, **cost.figures} for name, times, cost in kernels]
    return row | {"kernels": named}


def line(row: dict[str, Any]) -> str:
    times = f"{row['us']:.0f} | {row['bytes_us']:.0f} | {row['launches']} | {row['matmuls_us']:.0f}"
    return f"| {row['layer']} | {row['pipeline']} | {times} |"


def kernel_line(each: dict[str, Any]) -> str:
    parts = " ".join(f"{name[:-3]} {each[name]:.0f}" for name in ("bytes_us", "lanes_us", "slow_us"))
    count = f"{each['instructions']:.0f} and {each['slow']:.1f} slow an element, {each['registers']} registers"
    return f"    {each['times']} x {each['us']:6.1f} us ({parts}; {count}) {each['kernel'][:90]}"


def document(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What is kept: totals, and the most expensive kernels of each."""
    what = "kernels of layers lowered for sm_90 and disassembled without a GPU; times are predictions"
    shortened = [row | {"kernels": row["kernels"][:KEPT]} for row in rows]
    return {"what": what, "versions": {"torch": torch.__version__}, "rows": shortened}


def with_others(rows: list[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """These rows and those of a file that are not among them, layer by layer in the order of ``NAMES``."""
    names, layers = list(NAMES.values()), list(CASES)
    found = json.loads(path.read_text())["rows"] if path.exists() else []
    by_place = {(layers.index(row["layer"]), names.index(row["pipeline"])): row for row in (*found, *rows)}
    return [by_place[place] for place in sorted(by_place)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("layers", nargs="*", default=list(LAYERS))
    parser.add_argument("--kernels", type=int, default=0, help="print so many of each, the most expensive first")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pipelines", nargs="*", choices=list(NAMES), default=list(NAMES))
    options = parser.parse_args()
    fake_h100.install()
    print("| layer | kernels of | predicted us | bytes alone | launches | matmuls |")
    rows = []
    for case in options.layers:
        for pipeline in options.pipelines:
            rows.append(row_of(case, pipeline))
            print("\n".join([line(rows[-1]), *map(kernel_line, rows[-1]["kernels"][: options.kernels])]), flush=True)
    if options.json:
        write_json(options.json, document(with_others(rows, options.json)))


if __name__ == "__main__":
    main()
