"""The largest batch at one length, and the longest context at batch 1, whose training step fits; ours against BF16.

    peak(n) = fixed + n * slope     for a batch of n, or a context of n: so two measured peaks say which n should fit

That n is then tried. Where it does not fit n - n / 16 is, then a step twice as long, until one does; the answer is an n that
was run, beside the smallest that was seen to fail. On a CPU, where nothing fails, the limit is a number.

    python benchmarks/e2e/bench_capacity.py [--device cpu] [--tiny] [--json results.json]
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a script's own folder is all that is there

from benchmarks.e2e.bench_training import memory_split
from benchmarks.e2e.training import ARMS, Trainer
from benchmarks.harness import peers
from benchmarks.harness.llama import LLAMA_1B, TINY, Shape
from benchmarks.harness.run_alone import run_alone
from benchmarks.harness.timing import no_lap
from benchmarks.registry import Benchmark, Case, Row, Setting

MOST_TRIES = 5
TINY_LIMIT = 4 * 2**20  # bytes; a toy's
Peak = Callable[[int], "float | None"]


def largest(peak: Peak, limit: float, unit: int, first: tuple[int, int]) -> dict[str, Any]:
    """The largest multiple of ``unit`` found to stay within ``limit`` bytes; ``peak`` returns None where memory runs out.

    Returns:
        ``{"largest": n or 0, "fails": the smallest n seen to fail or None, "tries": [[n, peak], ...]}``
    """
    tries: list[tuple[int, float | None]] = []

    def fits(n: int) -> bool:
        tries.append((n, peak(n)))
        found = tries[-1][1]
        return found is not None and found <= limit

    if all([fits(n) for n in first]):
        low, high = (found for _, found in tries)
        assert low is not None and high is not None
        slope = max((high - low) / (first[1] - first[0]), 1e-9)
        n = int((first[0] + (limit - low) / slope) // unit * unit)
        step = max(unit, n // 16 // unit * unit)
        while n > first[1] and len(tries) < MOST_TRIES and not fits(n):
            n, step = n - step, 2 * step
    good = [n for n, found in tries if found is not None and found <= limit]
    bad = [n for n, _ in tries if n not in good]
    return {"largest": max(good, default=0), "fails": min(bad, default=None), "tries": [list(each) for each in tries]}


def measure(case: Case, setting: Setting) -> Row:
    """One arm, batch or context."""
    name, shape, what = case.shape["arm"], Shape(**case.shape["model"]), case.shape["what"]
    if why := peers.why_not(name, setting.device):
        return {"arms": {}, "left_out": {name: why}}

    def peak(n: int) -> float | None:
        batch, length = (n, case.shape["length"]) if what == "batch" else (1, n)
        return peak_of(shape, name, batch, length, setting.device)

    limit = TINY_LIMIT if setting.device.type != "cuda" else torch.cuda.mem_get_info()[1]
    found = largest(peak, limit, case.shape["unit"], tuple(case.shape["first"]))
    return {"arms": {}, "left_out": {}, "capacity": {name: {what: found}}, "limit": limit}


def peak_of(shape: Shape, arm: str, batch: int, length: int, device: torch.device) -> float | None:
    """The allocator's peak over two training steps, the sum of the parts on a CPU; None where memory runs out."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    try:
        trainer = Trainer(shape, ARMS[arm], batch, length, device)
        trainer.step(no_lap)
        split = memory_split(trainer, device)
    except torch.OutOfMemoryError:
        return None
    return split.get("peak", sum(split.values()))


def _cases(label: str, shape: Shape, what: str, values: dict[str, Any], *arms: str) -> tuple[Case, ...]:
    all_values = {"model": asdict(shape), "what": what, **values}
    return tuple(Case(f"{label} {what}, {arm}", {**all_values, "arm": arm}) for arm in arms)


BATCH = {"length": 2048, "unit": 1, "first": (2, 4)}
CONTEXT = {"unit": 1024, "first": (4096, 8192)}
BENCHMARKS = (
    Benchmark(
        "capacity",
        "e2e",
        "the largest batch of 2048 tokens and the longest context whose training step fits",
        ("inductor", "torchao"),
        (
            *_cases("1b", LLAMA_1B, "batch", BATCH, "ours", "inductor", "torchao"),
            *_cases("1b", LLAMA_1B, "context", CONTEXT, "ours", "inductor", "torchao"),
        ),
        _cases("tiny", TINY, "batch", {"length": 32, "unit": 1, "first": (1, 2)}, "inductor"),
        measure,
        limit=480,
    ),
)

if __name__ == "__main__":
    run_alone(BENCHMARKS, __doc__)
