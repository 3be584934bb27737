"""An optimizer's step on 256M BF16 parameters: ``opt fused``, a peer, or one of our state formats."""

from __future__ import annotations

import torch
from torch import nn

import fp8compile
from benchmarks.first.measuring import Measure
from benchmarks.first.speaking import Told
from benchmarks.harness.memory import state_bytes

SHAPES, PARAMETERS = ((4096, 4096), (4096, 1024), (11008, 4096), (4096,)), 256e6
TINY_SHAPES, TINY_PARAMETERS = ((64, 128), (256,)), 2e4


def run(told: Told, name: str) -> None:
    measure = Measure(told)
    parameters = _parameters(measure)
    optimizer = _optimizer(name, parameters)
    measure.compiled(optimizer.step, 2)
    elements, kept = sum(p.numel() for p in parameters), state_bytes(optimizer)
    least = elements * 6 + 2 * kept
    row = measure.times(optimizer.step, 20, 3)
    told.say(
        "optimizer",
        shape={"parameters": elements, "tensors": len(parameters)},
        bits=round(kept * 8 / elements, 2),
        gb_s=round(least / row["ms"] / 1e6),
        least_gb=round(least / 1e9, 3),
        **row,
    )
    measure.profiled("optimizer", optimizer.step)


def _parameters(measure: Measure) -> list[nn.Parameter]:
    shapes, wanted = (TINY_SHAPES, TINY_PARAMETERS) if measure.tiny else (SHAPES, PARAMETERS)
    found: list[nn.Parameter] = []
    while sum(p.numel() for p in found) < wanted:
        shape = shapes[len(found) % len(shapes)]
        parameter = nn.Parameter(torch.randn(shape, device=measure.device, dtype=torch.bfloat16) * 0.02)
        parameter.grad = torch.randn_like(parameter) * 1e-3
        found.append(parameter)
    return found


def _optimizer(name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if name == "fused":
        return torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    if name in ("ao_fp8", "ao_8bit"):
        import torchao.optim

        made = torchao.optim.AdamWFp8 if name == "ao_fp8" else torchao.optim.AdamW8bit
        return made(parameters, lr=1e-3)
    if name == "flash":
        from flashoptim import FlashAdamW

        return FlashAdamW(parameters, lr=1e-3)
    return fp8compile.optim.AdamW(parameters, lr=1e-3, state_format=name)
