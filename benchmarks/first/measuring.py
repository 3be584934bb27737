"""What arms measure with: times by events, kernels by the profiler, peaks of memory, errors in dB."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.first.speaking import Told
from fp8compile.numerics.metrics import sqnr

GIB = 2**30
NOT_KERNELS = (
    *("aten::", "autograd::", "Torch-Compiled", "## Call", "CompiledFunction", "cuda", "ProfilerStep"),
    *("Optimizer", "Inductor", "TorchDynamo", "Activity Buffer"),
)


class Measure:
    """On the device of an arm."""

    def __init__(self, told: Told) -> None:
        self.told, self.device, self.tiny = told, torch.device(told.device), told.tiny
        self.cuda = self.device.type == "cuda"

    def sync(self) -> None:
        """Wait for the device."""
        if self.cuda:
            torch.cuda.synchronize()

    def emptied(self) -> None:
        """Give back what nothing holds."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def compiled(self, step: Callable[[], Any], more: int = 2, **row: Any) -> None:
        """The first step, which compiles, and some more; then wait to be timed."""
        began = time.time()
        result = step()
        self.sync()
        first = time.time() - began
        began = time.time()
        for _ in range(more):
            step()
            self.sync()
        if isinstance(result, Tensor) and result.numel() == 1:
            row["loss"] = float(result.detach())
        self.told.say(
            "compiled",
            first_s=round(first, 1),
            next_s=round((time.time() - began) / max(more, 1), 3),
            **row,
        )
        del result
        self.emptied()
        self.told.ready()

    def times(self, call: Callable[[], Any], rounds: int, warm: int = 2) -> dict[str, float]:
        """Milliseconds a call by events around each; those of the host, and those in all."""
        rounds = rounds if self.cuda else min(rounds, 3)
        for _ in range(warm):
            call()
        self.sync()
        began = time.perf_counter()
        found, enqueued = self._by_events(call, rounds) if self.cuda else self._by_clock(call, rounds)
        wall = (time.perf_counter() - began) / rounds * 1e3
        row = {"ms": statistics.median(found), "min_ms": min(found), "max_ms": max(found)}
        row |= {"wall_ms": wall, "enqueue_ms": enqueued}
        return {name: round(value, 3) for name, value in row.items()} | {"n": rounds}

    def _by_events(self, call: Callable[[], Any], rounds: int) -> tuple[list[float], float]:
        began, pairs = time.perf_counter(), []
        for _ in range(rounds):
            pair = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
            pair[0].record()
            call()
            pair[1].record()
            pairs.append(pair)
        enqueued = (time.perf_counter() - began) / rounds * 1e3
        self.sync()
        return [first.elapsed_time(last) for first, last in pairs], enqueued

    def _by_clock(self, call: Callable[[], Any], rounds: int) -> tuple[list[float], float]:
        found = []
        for _ in range(rounds):
            began = time.perf_counter()
            call()
            found.append((time.perf_counter() - began) * 1e3)
        return found, sum(found) / rounds

    def profiled(self, what: str, call: Callable[[], Any], rounds: int = 3) -> None:
        """A fact with the device's time by kernel."""
        if not self.cuda:
            return
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
            for _ in range(rounds):
                call()
            self.sync()
        rows = [
            (event.key, event.count / rounds, event.self_device_time_total / rounds)
            for event in found.key_averages()
            if event.self_device_time_total > 0
            and str(event.device_type).endswith("CUDA")
            and not event.key.startswith(NOT_KERNELS)
        ]
        rows.sort(key=lambda row: -row[2])
        self.told.say(
            f"{what} profile",
            device_us=round(sum(row[2] for row in rows)),
            launches=round(sum(row[1] for row in rows)),
            kernels=[(name[:150], round(count, 1), round(us, 1)) for name, count, us in rows[:45]],
        )

    def peak(self, call: Callable[[], Any]) -> dict[str, int]:
        """Bytes before a call, at its peak, and what that is above."""
        if not self.cuda:
            return {}
        self.emptied()
        self.sync()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        self.sync()
        most = torch.cuda.max_memory_allocated()
        return {
            "before": before,
            "peak": most,
            "above": most - before,
            "reserved": torch.cuda.max_memory_reserved(),
        }

    def tried(self, what: str, call: Callable[[], Mapping[str, Any]]) -> None:
        """A fact, or its error as one; what comes after goes on."""
        try:
            self.told.say(what, **call())
        except Exception as error:
            self.told.failed(what, error)


def decibels(exact: Tensor, got: Tensor) -> float:
    """SQNR; -999 where something is not finite, 300 where nothing differs."""
    found = sqnr(exact, got)
    return round(found, 2) if math.isfinite(found) else 300.0 if found == math.inf else -999.0


def gib(row: Mapping[str, int]) -> dict[str, float]:
    """A row of bytes in GiB."""
    return {f"mem_{name}": round(value / GIB, 3) for name, value in row.items()}
