"""Compile time of a deep model, whole, block by block and with nested compile regions: cold and warm, beside plain Inductor.

    whole      torch.compile(model)
    blocks     fp8compile.compile_blocks(model), and ``block.compile()`` for plain Inductor
    regions    torch.compile(model), with the forward of a layer decorated with torch.compiler.nested_compile_region

Kernels are generated. Each figure is the CPU seconds of the first forward and backward less the second, the compiler's
processes included, in a process of its own: cold with an empty cache, then warm with what the cold one left. The model is
the demo's Llama. The arms alternate, so that a machine whose speed drifts slows all; the least of the runs counts.

    python benchmarks/studies/bench_compile_depth.py [--layers 2 8 32] [--ways whole blocks regions] [--runs 1] [--json FILE]

A run that was cut off goes on from its JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.output import write_json
from benchmarks.studies.compile_process import ARMS, cpu_seconds

WAYS = ("whole", "blocks", "regions")
COMPILING = """
import fp8compile

compiled = model
if way == "blocks":
    if options:
        fp8compile.compile_blocks(model, options)
    else:
        for block in model.model.layers:
            block.compile()
else:
    if way == "regions":
        layer = type(model.model.layers[0])
        layer.forward = torch.compiler.nested_compile_region(layer.forward)
    model.compile(**({"backend": "fp8compile", "options": options} if options else {}))
"""


def cold_and_warm(arm: str, layers: int, way: str) -> tuple[float, float]:
    """CPU seconds of a compilation with an empty cache, and of one that finds what the first left."""
    with tempfile.TemporaryDirectory() as cache:
        return tuple(cpu_seconds(COMPILING, arm, layers, way, cache) for _ in ("cold", "warm"))  # type: ignore[return-value]


def run(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Fill ``result["seconds"][way][layers][arm]`` with pairs of cold and warm, as far as they are missing."""
    for number in range(args.runs):
        for layers in args.layers:
            for way in args.ways:
                for arm in ARMS:
                    runs = result["seconds"].setdefault(way, {}).setdefault(str(layers), {}).setdefault(arm, [])
                    if len(runs) > number:
                        continue
                    runs.append(cold_and_warm(arm, layers, way))
                    print(
                        f"{layers:3d} layers, {way:8s} {arm:16s} {runs[-1][0]:6.1f} s, warm {runs[-1][1]:5.1f} s",
                        flush=True,
                    )
                    if args.json:
                        write_json(args.json, result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result: dict[str, Any] = {
        "what": "compilation of the demo's Llama (hidden 128, ffn 384, 8 x 256 tokens, BF16 autocast), CPU seconds",
        "device": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "seconds": {},
    }
    if args.json and args.json.exists():
        result["seconds"] = json.loads(args.json.read_text())["seconds"]
    run(args, result)


if __name__ == "__main__":
    main()
