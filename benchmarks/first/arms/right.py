"""Whether it is right: ``right layer1|layer2``, gradients against FP64; ``right opt``, steps against the CPU's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import fp8compile
from benchmarks.first.measuring import Measure, decibels
from benchmarks.first.speaking import Told
from benchmarks.first.ways import compiled
from benchmarks.harness.llama import Layer, Shape, initialised, rotary_tables

WAYS = ("inductor", "default", "storage", "linears", "delayed", "merged", "noattn")
FORMATS = ("e4m3_expanded", "int8_companded", "dynamic_tree", "4bit", "4bit_log", "fp32")
SHAPE, LENGTH = Shape(512, 1376, 8, 8), 256


def run(told: Told, what: str) -> None:
    measure = Measure(told)
    if what == "opt":
        for name in FORMATS[: 2 if measure.tiny else None]:
            for dtype in (torch.bfloat16, torch.float32):
                torch._dynamo.reset()
                measure.tried(f"optimizer {name} {dtype}", lambda n=name, d=dtype: _steps(measure, n, d))
        return
    batch = int(what.removeprefix("layer"))
    for way in WAYS[: 2 if measure.tiny else None]:
        torch._dynamo.reset()
        measure.tried(f"layer B={batch} {way}", lambda way=way: _gradients(measure, batch, way))


def _gradients(measure: Measure, batch: int, way: str) -> dict[str, Any]:
    """Of three steps: in the third, delayed scales are known and weights cached."""
    torch.manual_seed(7)
    layer = initialised(Layer(SHAPE), 0.05).bfloat16()
    x, dy = (torch.randn(batch, LENGTH, SHAPE.hidden).bfloat16() for _ in range(2))
    tables = rotary_tables(SHAPE, LENGTH, torch.device("cpu"), torch.bfloat16)
    exact = Layer(SHAPE).double()
    exact.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    wanted = _of(exact, exact, x.double(), dy.double(), tuple(t.double() for t in tables))
    layer, moved = layer.to(measure.device), tuple(t.to(measure.device) for t in tables)
    call, found = compiled(way, layer, measure.device), []
    for _ in range(3):
        got = _of(call, layer, x.to(measure.device), dy.to(measure.device), moved)
        each = {name: decibels(wanted[name], got[name]) for name in wanted}
        found.append((min(each.values()), min(each, key=each.__getitem__)))
    return {"shape": [batch, LENGTH, SHAPE.hidden], "worst_db": found}


def _of(call: Any, layer: nn.Module, x: Tensor, dy: Tensor, tables: tuple[Tensor, ...]) -> dict[str, Tensor]:
    layer.zero_grad()
    x = x.detach().requires_grad_()
    call(x, *tables).backward(dy)
    return {name: p.grad.cpu() for name, p in layer.named_parameters()} | {"x": x.grad.cpu()}


def _steps(measure: Measure, name: str, dtype: torch.dtype) -> dict[str, Any]:
    torch.manual_seed(0)
    here = nn.Parameter((torch.randn(256, 1024) * 0.02).to(dtype))
    there = nn.Parameter(here.detach().to(measure.device))
    start = here.detach().double()
    ours = fp8compile.optim.AdamW([here], lr=1e-3, state_format=name, compiled=False)
    theirs = fp8compile.optim.AdamW([there], lr=1e-3, state_format=name)
    for _ in range(5):
        gradient = (torch.randn(256, 1024) * 1e-3).to(dtype)
        here.grad, there.grad = gradient, gradient.to(measure.device)
        ours.step()
        theirs.step()
    moved = there.detach().cpu()
    return {
        "db_of_update": decibels(here.detach().double() - start, moved.double() - start),
        "equal": float((here.detach() == moved).float().mean()),
    }
