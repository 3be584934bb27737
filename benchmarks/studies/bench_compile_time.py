"""Cold compile time of the demo's Llama by its number of layers, forward and backward, ours over plain Inductor.

Two sums for each arm: the whole compilation, and the part of it that is no kernel generation (the graph is captured,
differentiated, rewritten and cut, and then run node by node). Both are seconds of CPU time, the compiler's processes
included, of the first step less the second. What a layer costs is the difference between two depths over their layers.

On a CPU the default recipe stores alone, since a CPU has no FP8 units; linears are emulated.

Each run is a process of its own with an empty cache; the arms alternate, so that a machine whose speed drifts slows all.
The least of the runs counts: a busy machine only ever adds. Beside the seconds stand the different kernels that the
compiler was run on, which no machine disturbs: they are most of a compilation. Layers that are alike share theirs.

    python benchmarks/studies/bench_compile_time.py [--layers 2 8 32] [--runs 3] [--kernel-layers 2 8] [--json results.json]
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.output import write_json
from benchmarks.studies.compile_process import ARMS, PLAIN, cpu_seconds

COMPILING = """
import functools
from torch._inductor.compile_fx import compile_fx
from fp8compile.compiler.node_by_node import run_the_graph

generate = way == "True"
if options:
    compiled = torch.compile(model, backend="fp8compile", options=options | ({} if generate else {"debug.codegen": "eager"}))
else:
    plain = "inductor" if generate else functools.partial(compile_fx, inner_compile=run_the_graph)
    compiled = torch.compile(model, backend=plain)
"""


def compile_once(arm: str, layers: int, generate: bool) -> tuple[float, int]:
    """CPU seconds that a process with an empty cache spends on the compilation, and the kernels that it compiles."""
    with tempfile.TemporaryDirectory() as cache:
        spent = cpu_seconds(COMPILING, arm, layers, str(generate), cache)
        return spent, sum(1 for _ in Path(cache).rglob("*.main.cpp"))


def per_layer(by_depth: Mapping[int, float]) -> list[float]:
    """What one more layer adds between each depth and the next."""
    return [(by_depth[more] - by_depth[less]) / (more - less) for less, more in pairwise(sorted(by_depth))]


def measured(depths: list[int], runs: int, generate: bool) -> dict[str, Any]:
    """Seconds of each run by arm and depth, and kernels; what a layer adds to both, and its seconds over plain Inductor's."""
    seconds: dict[str, dict[int, list[float]]] = {arm: {depth: [] for depth in depths} for arm in ARMS}
    kernels: dict[str, dict[int, int]] = {arm: {} for arm in ARMS}
    for depth in depths:
        for _ in range(runs):
            for arm in ARMS:
                spent, kernels[arm][depth] = compile_once(arm, depth, generate)
                seconds[arm][depth].append(spent)
                print(f"{depth:3d} layers, {arm:16s} {spent:6.1f} s, {kernels[arm][depth]} kernels", flush=True)
    layer = {arm: per_layer({depth: min(of) for depth, of in by_depth.items()}) for arm, by_depth in seconds.items()}
    over = {arm: [ours / plain for ours, plain in zip(layer[arm], layer[PLAIN], strict=True)] for arm in ARMS}
    more = {arm: per_layer(by_depth) for arm, by_depth in kernels.items()}
    for arm in ARMS:
        text = f"{arm:16s} a layer: {[round(s, 2) for s in layer[arm]]} s, x plain {[round(r, 2) for r in over[arm]]}"
        print(text + (f", kernels {[round(k, 1) for k in more[arm]]}" if generate else ""))
    result: dict[str, Any] = {"seconds": seconds, "seconds_per_layer": layer, "over_plain": over}
    return result | ({"kernels": kernels, "kernels_per_layer": more} if generate else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--runs", type=int, default=3, help="without kernels")
    parser.add_argument("--kernel-runs", type=int, default=1, help="of whole compilations, which are long")
    parser.add_argument("--kernel-layers", type=int, nargs="+", default=[2, 8], help="of whole compilations")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result: dict[str, Any] = {
        "what": "compilation of the demo's Llama (hidden 128, ffn 384, 8 x 256 tokens, BF16 autocast), cold, CPU seconds",
        "device": platform.processor() or platform.machine(),
        "torch": torch.__version__,
    }
    parts = (
        ("without kernels", args.layers, args.runs, False),
        ("whole", args.kernel_layers, args.kernel_runs, True),
    )
    for name, layers, runs, generate in parts:
        print(name)
        result[name] = measured(layers, runs, generate)
        if args.json:
            write_json(args.json, result)


if __name__ == "__main__":
    main()
