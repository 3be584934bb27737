"""What this machine reaches, measured in the process that measures a benchmark: the denominators of all percentages.

    copy   bytes read and written per second by a copy far larger than the L2 cache
    bf16   operations per second of a square BF16 product, 2 n^3 / seconds
    fp8    the same of _scaled_mm on E4M3 codes with one scale per tensor, where the device multiplies FP8

Random data: products of zeros draw less power and run faster.
"""

from __future__ import annotations

import torch

from benchmarks.harness.timing import Arm, Lap, measured
from benchmarks.registry import Setting
from fp8compile.linears.device import fp8_unsupported_reason

COPIED_BYTES, TINY_COPIED_BYTES = 2**30, 2**22
SIDE, TINY_SIDE = 8192, 128


def rates(setting: Setting) -> dict[str, float]:
    """``{"copy": bytes per second, "bf16": operations per second, "fp8": ...}``."""
    nbytes, side = (TINY_COPIED_BYTES, TINY_SIDE) if setting.tiny else (COPIED_BYTES, SIDE)
    work = {"copy": 2.0 * nbytes, "bf16": 2.0 * side**3, "fp8": 2.0 * side**3}
    arms = {"copy": _copy(nbytes, setting.device), "bf16": _bf16(side, setting.device)}
    if fp8_unsupported_reason(setting.device) is None:
        arms["fp8"] = _fp8(side, setting.device)
    found, failed = measured(arms, setting.device, setting.rounds)
    assert not failed, failed
    return {name: work[name] / laps["all"]["seconds"] for name, laps in found.items()}


def shares(lap: dict[str, float], reached: dict[str, float], unit: str = "bf16") -> dict[str, float]:
    """Of the copy's bandwidth and the product's rate; a lap that needs neither bytes nor operations has none."""
    found = {}
    if lap.get("bytes"):
        found["share_of_copy"] = lap["bytes"] / lap["seconds"] / reached["copy"]
    if lap.get("flops"):
        found["share_of_gemm"] = lap["flops"] / lap["seconds"] / reached.get(unit, reached["bf16"])
    return found


def _copy(nbytes: int, device: torch.device) -> Arm:
    source = torch.randint(-128, 127, (nbytes,), dtype=torch.int8, device=device)
    target = torch.empty_like(source)

    def arm(lap: Lap) -> None:
        target.copy_(source)
        lap("all")

    return arm


def _bf16(side: int, device: torch.device) -> Arm:
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))

    def arm(lap: Lap) -> None:
        torch.mm(a, b)
        lap("all")

    return arm


def _fp8(side: int, device: torch.device) -> Arm:
    a, b = (torch.randn(side, side, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device)

    def arm(lap: Lap) -> None:
        torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
        lap("all")

    return arm
