"""Seconds of the laps of several arms: medians, arms in turn, so that a machine whose speed drifts slows all alike.

GPU   CUDA events around each lap. Before it the L2 cache is overwritten, which also keeps the GPU busy while the CPU
      launches the lap's first kernels, so that short kernels are not timed as the launches in front of them
CPU   time.perf_counter

spread = (third quartile - first quartile) / median
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch

FLUSHED_BYTES = 512 * 2**20  # several times the L2 of any card; about 0.2 ms at 3 TB/s
WARM_UPS = 2
OUT_OF_MEMORY = "out of memory"

Lap = Callable[[str], None]
Arm = Callable[[Lap], object]


def no_lap(name: str) -> None:
    """For a call that is not timed."""


class CpuLaps:
    """``lap(name)`` ends the lap of that name and begins the next."""

    def __init__(self) -> None:
        self._found: dict[str, float] = defaultdict(float)
        self._start = time.perf_counter()

    def __call__(self, name: str) -> None:
        self._found[name] += time.perf_counter() - self._start
        self._start = time.perf_counter()

    def seconds(self) -> dict[str, float]:
        return dict(self._found)


class CudaLaps:
    """The same by events; every lap begins with a cold L2."""

    def __init__(self, flushed: torch.Tensor) -> None:
        self._flushed = flushed
        self._pairs: list[tuple[str, Any, Any]] = []
        self._begin()

    def __call__(self, name: str) -> None:
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        self._pairs.append((name, self._start, end))
        self._begin()

    def seconds(self) -> dict[str, float]:
        torch.cuda.synchronize()
        found: dict[str, float] = defaultdict(float)
        for name, start, end in self._pairs:
            found[name] += start.elapsed_time(end) / 1e3
        return dict(found)

    def _begin(self) -> None:
        self._flushed.zero_()
        self._start = torch.cuda.Event(enable_timing=True)
        self._start.record()


def laps_of(device: torch.device) -> Callable[[], CpuLaps | CudaLaps]:
    """Makes the laps of one call."""
    if device.type != "cuda":
        return CpuLaps
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device=device)
    return lambda: CudaLaps(flushed)


def measured(arms: Mapping[str, Arm], device: torch.device, rounds: int) -> tuple[dict[str, Any], dict[str, str]]:
    """``({arm: {lap: {"seconds", "spread"}}}, {arm: why it failed})``; an arm that fails does not stop the others."""
    working, failed = warmed_up(arms)
    new_laps = laps_of(device)
    times: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in working}
    for _ in range(rounds):
        for name, arm in working.items():
            laps = new_laps()
            arm(laps)
            for lap, seconds in laps.seconds().items():
                times[name][lap].append(seconds)
    return {arm: {lap: summary(each) for lap, each in laps.items()} for arm, laps in times.items()}, failed


def warmed_up(arms: Mapping[str, Arm]) -> tuple[dict[str, Arm], dict[str, str]]:
    """The arms that run, compiled and warm, and why the others do not."""
    working, failed = {}, {}
    for name, arm in arms.items():
        try:
            for _ in range(WARM_UPS):
                arm(no_lap)
        except Exception as error:
            failed[name] = reason(error)
        else:
            working[name] = arm
    return working, failed


def summary(seconds: list[float]) -> dict[str, float]:
    """Median and spread."""
    first, median, third = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
    return {"seconds": median, "spread": (third - first) / median}


def reason(error: BaseException) -> str:
    """An exception in a line."""
    if isinstance(error, torch.OutOfMemoryError):
        return OUT_OF_MEMORY
    inner = getattr(error, "inner_exception", None) or error
    lines = str(inner).strip().splitlines() or [""]
    return f"{type(inner).__name__}: {lines[0][:200]}"
