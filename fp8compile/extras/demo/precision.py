"""16 bit or FP32: training uses 16 bit unless the machine is far faster in FP32.

CUDA cards that multiply BF16 use it. On a CPU both are timed: forward and backward of the demo's own model
on a small batch, in turns, after a warm-up; the median of five counts. FP32 is chosen where BF16 takes more than 1.5
times as long, which is every CPU without BF16 instructions (AVX512-BF16, AMX): there each matmul is emulated. A core
with AVX2 only took 17 ms in FP32 and 110 ms in BF16.

FP16 is used only on request: it is the demo of loss scaling. On a CPU it is timed too, together with FP32, because a CPU
without FP16 instructions is slow at it (``fp16_cost``).
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

FAR_FASTER = 1.5
PROBE_TOKENS = 64
PROBE_REPEATS = 5
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
PURE_FP16 = "FP16 throughout: weights, activations, gradients; moments FP32. Arm fp32: all FP32"


@dataclass(frozen=True)
class Precision:
    """The dtype of matmuls and saved tensors, and why.

    Attributes:
        dtype: ``torch.bfloat16`` (under autocast), ``torch.float32``, or ``torch.float16`` (the model itself).
        why: one sentence for the reader.
        probe_seconds: median seconds per forward and backward of the probe, by dtype; empty where nothing was timed.
    """

    dtype: torch.dtype
    why: str
    probe_seconds: dict[str, float]

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """The context a forward runs in."""
        return torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.dtype is torch.bfloat16)


def choose_precision(model: Any, device: torch.device, asked: str = "auto") -> Precision:
    """The precision ``asked`` for; "auto": BF16, or FP32 if that is far faster or BF16 is missing. ``model`` stays as is."""
    if asked == "fp16":
        return Precision(torch.float16, PURE_FP16, {} if device.type == "cuda" else probe(_fp32_and_fp16(model)))
    if asked != "auto":
        return Precision(DTYPES[asked], f"{asked.upper()}, as asked", {})
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return Precision(torch.bfloat16, f"BF16: {name} multiplies it natively", {})
        return Precision(torch.float32, f"FP32: {name} has no BF16", {})
    return decide(probe(_fp32_and_bf16(model)))


def decide(times: dict[str, float]) -> Precision:
    """The choice by two measured times in seconds, of "float32" and of "bfloat16"."""
    fp32_s, bf16_s = times["float32"], times["bfloat16"]
    fp32 = bf16_s > FAR_FASTER * fp32_s
    rule = f"BF16 is chosen up to {FAR_FASTER:g} times FP32's time"
    why = f"{'FP32' if fp32 else 'BF16'} is chosen: {probe_text(times)}; {rule}"
    return Precision(torch.float32 if fp32 else torch.bfloat16, why, times)


def probe_text(times: dict[str, float]) -> str:
    """What was timed and where, and which number is which."""
    names = {"float32": "FP32", "bfloat16": "BF16", "float16": "FP16"}
    each = ", ".join(f"{seconds * 1e3:.1f} ms in {names[dtype]}" for dtype, seconds in times.items())
    cpu = f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    return f"forward and backward of {PROBE_TOKENS} bytes take {each} (medians of {PROBE_REPEATS}; {cpu})"


def probe(steps: dict[str, Callable[[], float]]) -> dict[str, float]:
    """Median seconds of each of ``steps``, taken in turns after a warm-up.

    Args:
        steps: by name, a function that takes a step and returns its seconds.
    """
    for step in steps.values():
        step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(PROBE_REPEATS):
        for name, step in steps.items():
            times[name].append(step())
    return {name: statistics.median(each) for name, each in times.items()}


def _fp32_and_bf16(model: Any) -> dict[str, Callable[[], float]]:
    return {"float32": lambda: _timed_step(model), "bfloat16": lambda: _timed_step(model, bf16=True)}


def _fp32_and_fp16(model: Any) -> dict[str, Callable[[], float]]:
    half = copy.deepcopy(model).half()
    return {"float32": lambda: _timed_step(model), "float16": lambda: _timed_step(half)}


def _timed_step(model: Any, bf16: bool = False) -> float:
    tokens = torch.arange(PROBE_TOKENS)[None]
    start = time.perf_counter()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    seconds = time.perf_counter() - start
    model.zero_grad(set_to_none=True)
    return seconds
