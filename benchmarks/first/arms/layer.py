"""One decoder layer: forward and backward in a way, what it keeps, its peak, its kernels, and its gradients against FP32."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.first.measuring import Measure, decibels
from benchmarks.first.speaking import Told
from benchmarks.first.ways import compiled
from benchmarks.harness.llama import LLAMA2_7B, LLAMA3_8B, TINY, Layer, Shape, initialised, rotary_tables

SHAPES = {"7b": (LLAMA2_7B, 8, 2048), "8b": (LLAMA3_8B, 2, 4096), "8b1": (LLAMA3_8B, 1, 8192)}


class Case:
    """A layer with its inputs, at one of ``SHAPES``."""

    def __init__(self, measure: Measure, size: str, way: str) -> None:
        self.shape, self.batch, self.length = (TINY, 2, 64) if measure.tiny else SHAPES[size]
        torch.manual_seed(0)
        with measure.device:
            self.layer = initialised(Layer(self.shape)).to(torch.bfloat16)
            x, self.dy = (torch.randn(self.batch, self.length, self.shape.hidden).bfloat16() for _ in range(2))
        self.x = x.requires_grad_()
        self.tables = rotary_tables(self.shape, self.length, measure.device, torch.bfloat16)
        self.call = compiled(way, self.layer, measure.device)

    def forward(self) -> Tensor:
        return self.call(self.x, *self.tables)

    def backward(self) -> None:
        self.forward().backward(self.dy)

    def step(self) -> None:
        self.backward()
        self.forget()

    def forget(self) -> None:
        self.x.grad = None
        self.layer.zero_grad(set_to_none=True)

    def gradients(self) -> dict[str, Tensor]:
        return {name.replace("_orig_mod.", ""): p.grad.float().cpu() for name, p in self.layer.named_parameters()} | {
            "x": self.x.grad.float().cpu()
        }


def run(told: Told, way: str, size: str) -> None:
    measure = Measure(told)
    case = Case(measure, size, way)
    measure.compiled(case.step, 3)
    from fp8compile.tools.step_memory import saved_bytes

    unit = case.batch * case.length * case.shape.hidden * 2
    row = measure.times(case.step, 30, 4)
    once = measure.times(case.forward, 20)["ms"]
    kept = saved_bytes(case.forward, [*case.layer.parameters(), *case.layer.buffers(), *case.tables])
    above = measure.peak(case.step).get("above", 0)
    shape = {"batch": case.batch, "length": case.length, "hidden": case.shape.hidden, "ffn": case.shape.ffn}
    told.say(
        "layer",
        shape=shape,
        **row,
        forward_ms=once,
        kept_units=round(kept / unit, 3),
        peak_units=round(above / unit, 2),
    )
    measure.profiled("layer", case.step)
    measure.tried("layer gradients", lambda: _against_fp32(measure, case))


def _against_fp32(measure: Measure, case: Case) -> dict[str, object]:
    case.backward()
    got, weights = case.gradients(), {n.replace("_orig_mod.", ""): v for n, v in case.layer.state_dict().items()}
    case.forget()
    measure.emptied()
    exact = _exact_gradients(case.shape, weights, case, measure.device)
    found = {name: decibels(exact[name], got[name]) for name in exact}
    return {"worst": min(found.values()), "db": found}


def _exact_gradients(shape: Shape, weights: dict[str, Tensor], case: Case, device: torch.device) -> dict[str, Tensor]:
    layer = Layer(shape).to(device)
    layer.load_state_dict({name: value.float() for name, value in weights.items()})
    x = case.x.detach().float().requires_grad_()
    layer(x, *(table.float() for table in case.tables)).backward(case.dy.float())
    return {name: p.grad.cpu() for name, p in layer.named_parameters()} | {"x": x.grad.cpu()}
