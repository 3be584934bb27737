"""What a lap of a benchmark of kernels is predicted to take on an H200, of counts that a results file holds.

    us = sum of its kernels (kernel_time.py) and of its library calls (a roofline of fp8compile/cost/device_rates.py)

The counts are made without a GPU by tests/sm90/run_kernels.py. What bounds a lap is what most of its time goes to: bytes,
instructions, the slow pipe of special functions, matmuls, or launches.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.kernel_time import BYTES, LAUNCH, WARPS, read
from fp8compile.cost.device_rates import RATES

LOWERED = ("ours", "inductor")  # arms whose kernels are generated, by the beginning of their names
PRODUCTS = ("bf16 products", "fp8 products")  # arms that are one library call a lap
CARD = {"copy": BYTES, "bf16": 807e12, "fp8": 1525e12}  # read on an H200: first-contact-h200.json
H200 = RATES["h200"]
RESOURCES = {"bytes_us": "bytes", "lanes_us": "instructions", "slow_us": "slow pipe"}
FEW_WARPS = ", few warps"


@dataclass(frozen=True)
class Price:
    """Of a lap.

    Attributes:
        us: microseconds, predicted.
        launches: of kernels and library calls.
        num_bytes: that it moves.
        instructions: an element; None of a library call.
        slow: those among them that the special function units take.
        registers: of a thread, the most of its kernels; 0 of a library call.
        spilled: bytes that a thread has no registers for, the most of its kernels.
        bound: what most of its time goes to.
    """

    us: float
    launches: int
    num_bytes: int
    instructions: float | None
    slow: float | None
    registers: int
    spilled: int
    bound: str


def price(row: Mapping[str, Any]) -> Price | None:
    """The price of a row of counts; None where it has none."""
    if "no_price" in row:
        return None
    kernels, calls = row["kernels"], row["calls"]
    parts = _parts(kernels, calls)
    elements = max((each["elements"] for each in kernels), default=0)
    issued, slow = (sum(k["launches"] * k[name] for k in kernels) for name in ("issued", "slow_issued"))
    return Price(
        us=sum(parts.values()),
        launches=sum(each["launches"] for each in (*kernels, *calls)),
        num_bytes=sum(k["launches"] * k["num_bytes"] for k in kernels) + sum(call["bytes"] for call in calls),
        instructions=issued / elements if elements else None,
        slow=slow / elements if elements else None,
        registers=max((each["registers"] for each in kernels), default=0),
        spilled=max((each["spilled"] for each in kernels), default=0),
        bound=max(parts, key=lambda name: parts[name]),
    )


def rate(least: Mapping[str, Any], us: float, reached: Mapping[str, float] = CARD) -> tuple[str, float]:
    """GB/s or TFLOP/s of the least that a lap must do, in words, and its share of what a card reached."""
    if least.get("flops"):
        per_second = least["flops"] / us * 1e6
        return f"{per_second / 1e12:,.0f} TFLOP/s", per_second / reached.get(least["unit"], reached["bf16"])
    per_second = least.get("bytes", 0) / us * 1e6
    return f"{per_second / 1e9:,.0f} GB/s", per_second / reached["copy"]


def _parts(kernels: Iterable[Mapping[str, Any]], calls: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Microseconds by what they go to."""
    parts: dict[str, float] = collections.defaultdict(float)
    for each in kernels:
        cost = read(each)
        resource = max(cost.by_resource, key=lambda name: cost.by_resource[name])
        few = FEW_WARPS if cost.warps < WARPS else ""
        parts[RESOURCES[resource] + few] += each["launches"] * (cost.us - LAUNCH)
        parts["launch"] += each["launches"] * LAUNCH
    for call in calls:
        rate_of_unit = H200.fp8 if call["unit"] == "fp8" else H200.bf16
        us, moving = (H200.microseconds(n, rate_of_unit, call["bytes"]) - H200.gap for n in (call["flops"], 0))
        parts["matmul" if us > moving else "bytes"] += us
        parts["launch"] += call["launches"] * H200.gap
    return parts
