"""Cold compile time of one Llama layer, forward and backward, fp8compile over plain Inductor: the ratio, side by side.

On a CPU the default recipe is "storage_only", since a CPU has no FP8 units.

Each run is a process of its own with an empty cache; the arms alternate, so that a machine whose speed drifts slows both.

    python benchmarks/bench_compile_time.py [--runs 3] [--json results.json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
ARMS = {
    "inductor": {"backend": "inductor"},
    "storage_only": {"backend": "fp8compile", "options": {"preset": "storage_only"}},
    "emulated linears": {"backend": "fp8compile", "options": {"emulate": True}},
}
CODE = """
import json, sys, time, torch
from tests.support.measure import llama_case
layer, args = llama_case()
compiled = torch.compile(layer, **json.loads(sys.argv[1]))
start = time.perf_counter()
compiled(*args).sum().backward()
print(time.perf_counter() - start)
"""


def seconds(arm: str) -> float:
    """Seconds of the first step, of which nearly all is compilation, in a process and a cache of its own."""
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", CODE, json.dumps(ARMS[arm])]
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    times: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for _ in range(args.runs):
        for arm in ARMS:
            times[arm].append(seconds(arm))
            print(f"{arm:16s} {times[arm][-1]:6.1f} s", flush=True)
    plain = statistics.median(times["inductor"])
    ratios = {arm: statistics.median(runs) / plain for arm, runs in times.items()}
    for arm, ratio in ratios.items():
        print(f"{arm:16s} median {statistics.median(times[arm]):6.1f} s, {ratio:.2f} x plain Inductor")
    if args.json:
        result = {
            "what": "first step of one Llama layer (hidden 512, ffn 1376, 8 heads, 2 x 256 tokens, BF16), cold, seconds",
            "device": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "seconds": times,
            "ratio_of_medians": ratios,
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
