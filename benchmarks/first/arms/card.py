"""What the card itself reaches: copies, products, attention."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.first.measuring import Measure
from benchmarks.first.speaking import PEERS, Told


def run(told: Told) -> None:
    measure = Measure(told)
    told.say("environment", cpus=os.cpu_count(), **_gpu(measure), **_peers())
    _copy(measure)
    _products(measure)
    for batch, length in ((1, 8192), (2, 4096)) if measure.cuda else ():
        for grouped in (False, True):
            what = f"sdpa B={batch} L={length} gqa={grouped}"
            measure.tried(what, lambda b=batch, n=length, g=grouped: _attention(measure, b, n, g))


def _gpu(measure: Measure) -> dict[str, Any]:
    if not measure.cuda:
        return {}
    found = torch.cuda.get_device_properties(0)
    return {
        "sms": found.multi_processor_count,
        "gib": round(found.total_memory / 2**30, 1),
        "cap": torch.cuda.get_device_capability(),
        "cudnn": torch.backends.cudnn.version(),
        "cuda": torch.version.cuda,
    }


def _peers() -> dict[str, str]:
    return {name: "there" if importlib.util.find_spec(name) else "missing" for name in sorted(PEERS)}


def _copy(measure: Measure) -> None:
    size = 2**30 if measure.cuda else 2**20
    source = torch.empty(size, dtype=torch.uint8, device=measure.device).random_()
    target = torch.empty_like(source)
    row = measure.times(lambda: target.copy_(source), 20)
    measure.told.say("copy", shape=[size], gb_s=round(2 * size / row["min_ms"] / 1e6), **row)


def _products(measure: Measure) -> None:
    k = 8192 if measure.cuda else 128
    x, w = (torch.randn(k, k, device=measure.device).bfloat16() for _ in range(2))
    q, r = ((each / 8).to(torch.float8_e4m3fn) for each in (x, w))
    one = torch.ones((), device=measure.device)

    def timed(call: Any) -> dict[str, Any]:
        row = measure.times(call, 20)
        return {"shape": [k, k, k], "tflops": round(2 * k**3 / row["ms"] / 1e9), **row}

    measure.tried("bf16 matmul", lambda: timed(lambda: x @ w))
    for fast in (True, False):

        def call(fast: bool = fast) -> torch.Tensor:
            return torch._scaled_mm(q, r.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)

        measure.tried(f"fp8 matmul fast={fast}", lambda call=call: timed(call))


def _attention(measure: Measure, batch: int, length: int, grouped: bool) -> dict[str, Any]:
    def made(heads: int) -> torch.Tensor:
        shape = (batch, heads, length, 128)
        return torch.randn(shape, device=measure.device, dtype=torch.bfloat16, requires_grad=True)

    q, k, v = made(32), made(8 if grouped else 32), made(8 if grouped else 32)

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

    y = forward()
    dy = torch.randn_like(y)
    once = measure.times(forward, 10)["ms"]
    both = measure.times(lambda: forward().backward(dy), 10)["ms"]
    tflops = round(2 * 2 * batch * 32 * length * length * 128 / 2 / once / 1e9)
    return {"op": type(y.grad_fn).__name__, "forward": once, "both": both, "tflops_forward": tflops}
