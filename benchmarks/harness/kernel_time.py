"""What a generated kernel is predicted to take on an H200, from its machine code: its longest resource, and a launch.

    us = LAUNCH + max(bytes / BYTES, instructions / LANES, slow ones / SLOW) / min(1, warps / WARPS)

``BYTES`` is the rate of a copy there, ``SLOW`` what its special function units issue (exponentials, logarithms, roots,
reciprocals), ``LAUNCH`` the mean of 88 launches of kernels that do next to nothing. ``LANES`` and ``WARPS`` are fitted to
kernels whose times were read on that card (benchmarks/results/kernels-h200-read.json, made by
benchmarks/studies/kernels_read.py): instructions reach three quarters of what the card can issue, 3.3e13 a second, and where
fewer than ``WARPS`` warps are on a multiprocessor, its resources are waited for. Left out: the L2 cache, stores that are
scattered, and a card's last multiprocessors, which wait for a kernel's last programs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fp8compile.cost.device_rates import LANES as LANES_OF_ALL
from fp8compile.cost.device_rates import TERA

BYTES, LANES, SLOW = 4.2e12, LANES_OF_ALL * TERA, 4.2e12  # a second
LAUNCH, WARPS = 2.6, 20  # microseconds; of the 64 that a multiprocessor holds


@dataclass(frozen=True)
class KernelCost:
    """One launch.

    Attributes:
        num_bytes: read and written.
        issued: instructions of all lanes.
        slow_issued: those among them that the special function units take.
        elements: that it goes over.
        registers: a thread's.
        warps: that a multiprocessor holds of it.
        blocks: the configuration.
        spilled: bytes that a thread has no registers for.
    """

    num_bytes: int
    issued: float
    slow_issued: float
    elements: int
    registers: int
    warps: float
    blocks: str
    spilled: int = 0

    @property
    def by_resource(self) -> dict[str, float]:
        """Microseconds that each resource takes at its rate."""
        rates = {
            "bytes_us": self.num_bytes / BYTES,
            "lanes_us": self.issued / LANES,
            "slow_us": self.slow_issued / SLOW,
        }
        return {name: seconds * 1e6 for name, seconds in rates.items()}

    @property
    def us(self) -> float:
        return LAUNCH + max(self.by_resource.values()) / min(1.0, self.warps / WARPS)

    @property
    def counts(self) -> dict[str, Any]:
        """What ``read`` takes, as a file of results holds it."""
        of_threads = {"registers": self.registers, "warps": self.warps, "spilled": self.spilled}
        counted = {"num_bytes": self.num_bytes, "issued": self.issued, "slow_issued": self.slow_issued}
        return {**counted, "elements": self.elements, **of_threads}

    @property
    def figures(self) -> dict[str, Any]:
        """As tables show it: microseconds by resource, instructions an element."""
        each = {"instructions": self.issued / self.elements, "slow": self.slow_issued / self.elements}
        of_threads = {"registers": self.registers, "warps": self.warps, "blocks": self.blocks}
        return {"us": self.us, **self.by_resource, "elements": self.elements, **each, **of_threads}


def read(row: Mapping[str, Any]) -> KernelCost:
    """The cost of a kernel whose counts a file of results holds."""
    counts = row["num_bytes"], row["issued"], row["slow_issued"], row.get("elements", 1)
    return KernelCost(*counts, row["registers"], row["warps"], blocks="", spilled=row.get("spilled", 0))


def totals(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Microseconds of all launches of such kernels: predicted, read."""
    read_us = sum(row["launches"] * row["read_us"] for row in rows)
    return sum(row["launches"] * read(row).us for row in rows), read_us


def error(rows: Sequence[Mapping[str, Any]]) -> float:
    """The root of the mean square of log(predicted / read), weighted by time."""
    weights = [row["launches"] * row["read_us"] for row in rows]
    squares = [math.log(read(row).us / row["read_us"]) ** 2 for row in rows]
    return math.sqrt(sum(w * each for w, each in zip(weights, squares, strict=True)) / sum(weights))
