"""A set-up (``models``) in a way: its time, what is kept, its kernels, gradients against FP32, some steps' losses.

SHORT=1 leaves gradients and losses out. LAYERS=2 makes it of two layers.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fp8compile
from benchmarks.first.measuring import GIB, Measure, decibels
from benchmarks.first.models import SetUp, built
from benchmarks.first.speaking import Told
from benchmarks.first.ways import OTHERS, compiled

STEPS = 20


class Case:
    """A set-up, compiled."""

    def __init__(self, measure: Measure, name: str, way: str) -> None:
        self.device = measure.device
        self.setup: SetUp = built(name, measure.device, measure.tiny, int(os.environ.get("LAYERS", "0")))
        self.call: Callable[..., Any] = compiled(way, self.setup.model, measure.device)

    def forward(self) -> Tensor:
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.setup.autocast):
            return self.setup.loss(self.call)

    def step(self) -> None:
        self.forward().backward()
        self.setup.model.zero_grad(set_to_none=True)


def run(told: Told, name: str, way: str) -> None:
    measure = Measure(told)
    case = Case(measure, name, way)
    measure.compiled(case.step)
    row: dict[str, Any] = measure.times(case.step, 15, 3)
    told.say("setup", shape=case.setup.shape, **row, **_memory(measure, case))
    measure.profiled("setup", case.step, 1)
    if way not in OTHERS:
        measure.tried("report", lambda: _report(case))
    if os.environ.get("SHORT") == "1":
        return
    measure.tried("setup losses", lambda: _losses(measure, case))
    if case.setup.repeatable:
        measure.tried("setup gradients", lambda: _against_fp32(case))


def _memory(measure: Measure, case: Case) -> dict[str, float]:
    if not measure.cuda:
        return {}
    measure.emptied()
    before = torch.cuda.memory_allocated()
    loss = case.forward()
    kept = torch.cuda.memory_allocated() - before
    loss.backward()
    case.setup.model.zero_grad(set_to_none=True)
    return {"kept_gib": round(kept / GIB, 3), "above_gib": round(measure.peak(case.step)["above"] / GIB, 3)}


def _report(case: Case) -> dict[str, Any]:
    found = fp8compile.report(case.call)
    remarks = [str(each)[:200] for each in found.remarks][:4]
    return {
        "linears": len(found.linears),
        "saved": found.saved_bytes,
        "plain": found.saved_bytes_plain,
        "remarks": remarks,
    }


def _losses(measure: Measure, case: Case) -> dict[str, Any]:
    weights = {name: value.clone() for name, value in case.setup.model.state_dict().items()}
    trained = [p for p in case.setup.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=measure.cuda)
    found = []
    for _ in range(2 if measure.tiny else STEPS):
        loss = case.forward()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        found.append(round(float(loss.detach()), 4))
    case.setup.model.load_state_dict(weights)
    return {"losses": found[:2] + found[-2:]}


def _against_fp32(case: Case) -> dict[str, Any]:
    """The last thing that an arm does: what compiled it is forgotten."""
    model = case.setup.model
    case.forward().backward()
    got = {name: p.grad.float().cpu() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    torch._dynamo.reset()
    exact = copy.deepcopy(model).float()
    torch.compiler.set_stance("force_eager")
    case.setup.loss(exact).backward()
    wanted = {name: p.grad.cpu() for name, p in exact.named_parameters() if p.grad is not None and p.grad.norm() > 0}
    found = {name: decibels(wanted[name], got[name]) for name in wanted}
    whole = decibels(*(torch.cat([of[name].flatten() for name in wanted]) for of in (wanted, got)))
    return {"db_all": whole, "db_worst": sorted((value, name) for name, value in found.items())[:3]}
