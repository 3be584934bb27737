"""16 bit or FP32: a 16-bit step is worth training with unless the machine is far faster without.

CUDA cards that multiply BF16 use it. On a CPU both are timed: forward and backward of the demo's own model
on a small batch, in turns, the best of each counts. FP32 is chosen where BF16 takes more than 1.5 times as
long, which is every CPU without BF16 instructions (AVX512-BF16, AMX): there each product is emulated. A core
with AVX2 and no more took 17 ms in FP32 and 110 ms in BF16.

FP16 is only there when asked for: it is the demo of loss scaling, and a CPU without FP16 instructions is slow at it.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

FAR_FASTER = 1.5
PROBE_TOKENS = 64
PROBE_REPEATS = 4
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
PURE_FP16 = "FP16 throughout: weights, activations, gradients; moments FP32. Arm fp32: all FP32"


@dataclass(frozen=True)
class Precision:
    """The dtype of products and saved tensors, and why.

    Attributes:
        dtype: ``torch.bfloat16`` (under autocast), ``torch.float32``, or ``torch.float16`` (the model itself).
        why: one sentence for the reader.
        probe_seconds: seconds per forward and backward of the probe, by dtype; empty where nothing was timed.
    """

    dtype: torch.dtype
    why: str
    probe_seconds: dict[str, float]

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """The context a forward runs in."""
        return torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.dtype is torch.bfloat16)


def choose_precision(model: Any, device: torch.device, asked: str = "auto") -> Precision:
    """What is ``asked`` for; "auto": BF16, or FP32 where that is far faster or BF16 is not there. ``model`` stays as is."""
    if asked == "fp16":
        return Precision(torch.float16, PURE_FP16, {})
    if asked != "auto":
        return Precision(DTYPES[asked], f"{asked.upper()}, as asked", {})
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return Precision(torch.bfloat16, f"BF16: {name} multiplies it natively", {})
        return Precision(torch.float32, f"FP32: {name} has no BF16", {})
    return decide(*_probe(model))


def decide(fp32_s: float, bf16_s: float) -> Precision:
    """The choice between two measured times, seconds."""
    times = {"float32": fp32_s, "bfloat16": bf16_s}
    cpu = f"this CPU ({torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads)"
    measured = f"{fp32_s * 1e3:.0f} against {bf16_s * 1e3:.0f} ms for a step of {PROBE_TOKENS} bytes"
    if bf16_s > FAR_FASTER * fp32_s:
        why = f"FP32, {bf16_s / fp32_s:.1f} times as fast as BF16 on {cpu}: {measured}"
        return Precision(torch.float32, why, times)
    return Precision(torch.bfloat16, f"BF16; FP32 is not far faster on {cpu}: {measured}", times)


def _probe(model: Any) -> tuple[float, float]:
    """Seconds of one forward and backward in FP32 and in BF16: the best of a few, after one that warms up."""
    times = [(_timed_step(model, bf16=False), _timed_step(model, bf16=True)) for _ in range(1 + PROBE_REPEATS)]
    fp32, bf16 = zip(*times[1:], strict=True)
    return min(fp32), min(bf16)


def _timed_step(model: Any, bf16: bool) -> float:
    tokens = torch.arange(PROBE_TOKENS)[None]
    start = time.perf_counter()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    seconds = time.perf_counter() - start
    model.zero_grad(set_to_none=True)
    return seconds
