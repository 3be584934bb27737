"""One step's kernels under Nsight Compute; with ``-host`` behind the way, its Python by function instead."""

from __future__ import annotations

import cProfile
import os
import pstats
import time
from collections.abc import Callable

import torch

from benchmarks.first import nsight
from benchmarks.first.arms import layer, setups
from benchmarks.first.measuring import Measure
from benchmarks.first.speaking import Told


def run(told: Told, name: str, way: str) -> None:
    measure, host = Measure(told), way.endswith("-host")
    way = way.removesuffix("-host")
    if measure.cuda and not host and nsight.found() is None:
        raise FileNotFoundError("There is no ncu here. Fix: install Nsight Compute, or put it on PATH.")
    case = layer.Case(measure, "7b", way) if name == "layer7b" else setups.Case(measure, name, way)
    measure.compiled(case.step)
    if host:
        _by_function(measure, case.step)
    elif measure.cuda:
        torch.cuda.cudart().cudaProfilerStart()
        case.step()
        measure.sync()
        torch.cuda.cudart().cudaProfilerStop()


def _by_function(measure: Measure, step: Callable[[], None]) -> None:
    with torch.autograd.set_multithreading_enabled(False):
        step()
        measure.sync()
        began = time.perf_counter()
        step()
        enqueued = time.perf_counter()
        measure.sync()
        row = {"enqueue_ms": round((enqueued - began) * 1e3, 2)}
        row["wall_ms"] = round((time.perf_counter() - began) * 1e3, 2)
        measure.told.say("host", **row)
        profile = cProfile.Profile()
        profile.enable()
        step()
        profile.disable()
        measure.sync()
    found = pstats.Stats(profile)
    rows = sorted(
        (
            (own, calls, f"{os.path.basename(file)}:{line}({function})")
            for (file, line, function), (_, calls, own, _, _) in found.stats.items()
        ),
        reverse=True,
    )
    measure.told.say(
        "host profile",
        total_ms=round(found.total_tt * 1e3, 2),
        rows=[(round(own * 1e3, 2), calls, name) for own, calls, name in rows[:45]],
    )
