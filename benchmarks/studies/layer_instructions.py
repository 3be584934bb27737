"""What the generated kernels of a layer are predicted to take on an H200, from code lowered and disassembled. No GPU.

A kernel takes the longest of its bytes, its instructions and the slow ones among them (tests/sm90/kernel_cost.py). All
figures are predictions, and low ones: registers, the L2 cache and launches are left out. Matmuls, attention and amaxes of
weights are the libraries', and not in it. "bytes" is what the same kernels would take if only their bytes counted.

python benchmarks/studies/layer_instructions.py [--json results.json [--before COMMIT JSON]] [--kernels N] ["vit 16k" ...]
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.output import write_json
from tests.sm90 import fake_h100
from tests.sm90.kernel_cost import KernelCost, cost_of
from tests.sm90.layers import BOTH, CASES, LINEARS, PLAIN, STORAGE
from tests.sm90.run_layers import backend_of, lowered_layer

KEPT, TOTALS = 8, ("layer", "pipeline", "us", "bytes_us", "launches")
LAYERS = ("vit 16k", "bert 16k", "llama 16k")
NAMES = {PLAIN: "plain Inductor", STORAGE: "storage alone", LINEARS: "linears alone", BOTH: "default"}


def kernels_of(case: str, pipeline: str) -> tuple[list[tuple[str, int, KernelCost]], int]:
    """``(name, launches, cost)`` of a layer's kernels, the most expensive first, and all launches of generated kernels."""
    found, launches = [], 0
    for half, graph in zip(("forward", "backward"), lowered_layer(CASES[case], backend_of(pipeline)), strict=True):
        launches += len(graph.launches)
        for name, times in collections.Counter(graph.launches).items():
            if cost := cost_of(graph.kernels[name]):
                found.append((f"{half} {name}", times, cost))
    return sorted(found, key=lambda each: -each[1] * each[2].us), launches


def row_of(case: str, pipeline: str) -> dict[str, Any]:
    kernels, launches = kernels_of(case, pipeline)
    row = {"layer": case, "pipeline": NAMES[pipeline], "launches": launches}
    row["us"] = sum(times * cost.us for _, times, cost in kernels)
    row["bytes_us"] = sum(times * cost.bytes_us for _, times, cost in kernels)
    named = [{"kernel": name, "times": times, "us": cost.us, **asdict(cost)} for name, times, cost in kernels]
    return row | {"kernels": named}


def line(row: dict[str, Any]) -> str:
    return f"| {row['layer']} | {row['pipeline']} | {row['us']:.0f} | {row['bytes_us']:.0f} | {row['launches']} |"


def kernel_line(each: dict[str, Any]) -> str:
    parts = " ".join(f"{name[:-3]} {each[name]:.0f}" for name in ("bytes_us", "lanes_us", "slow_us"))
    count = f"{each['instructions']:.0f} and {each['slow']:.1f} slow an element, {each['registers']} registers"
    return f"    {each['times']} x {each['us']:6.1f} us ({parts}; {count}) {each['kernel'][:90]}"


def document(rows: list[dict[str, Any]], before: tuple[str, str] | None) -> dict[str, Any]:
    """What is kept: the most expensive kernels of each, and the totals of another commit's run."""
    what = "kernels of layers lowered for sm_90 and disassembled without a GPU; times are predictions"
    kept = [row | {"kernels": row["kernels"][:KEPT]} for row in rows]
    found: dict[str, Any] = {"what": what, "versions": {"torch": torch.__version__}, "rows": kept}
    if before:
        commit, path = before
        totals = [{name: row[name] for name in TOTALS} for row in json.loads(Path(path).read_text())["rows"]]
        found["before"] = {"commit": commit, "rows": totals}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("layers", nargs="*", default=list(LAYERS))
    parser.add_argument("--kernels", type=int, default=0, help="print so many of each, the most expensive first")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--before", nargs=2, metavar=("COMMIT", "JSON"), help="what another commit's run wrote")
    options = parser.parse_args()
    fake_h100.install()
    print("| layer | kernels of | predicted us | bytes alone | launches |")
    rows = []
    for case in options.layers:
        for pipeline in NAMES:
            rows.append(row_of(case, pipeline))
            print("\n".join([line(rows[-1]), *map(kernel_line, rows[-1]["kernels"][: options.kernels])]), flush=True)
    if options.json:
        write_json(options.json, document(rows, options.before))


if __name__ == "__main__":
    main()
