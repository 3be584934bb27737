"""What benchmarks of kernels and layers do with their arms: time them, and set them against what this machine reaches."""

from __future__ import annotations

import functools
from typing import Any

from benchmarks.harness import rates
from benchmarks.harness.timing import measured
from benchmarks.registry import Arms, Row, Setting

rates_of = functools.cache(rates.rates)  # once in a process


def counted(nbytes: float = 0, flops: float = 0, unit: str = "bf16") -> dict[str, Any]:
    """The least that a lap must do, by its shapes; ``unit``: the product whose rate is the ceiling."""
    return {"bytes": nbytes, "flops": flops, "unit": unit}


def kernel_row(arms: Arms, setting: Setting) -> Row:
    """A row: the laps of each arm with their least work and their shares of this machine's rates."""
    times, failed = measured(arms.calls, setting.device, setting.rounds)
    reached = rates_of(setting)
    for arm, laps in times.items():
        for name, lap in laps.items():
            lap |= {key: value for key, value in arms.least(arm, name).items() if value}
            lap |= rates.shares(lap, reached, lap.pop("unit", "bf16"))
    return {"arms": times, "left_out": {**arms.left_out, **failed}, "rates": reached, **arms.notes}
