"""Whole training steps: ``train WAY OPTIMIZER``, six layers of Llama-1B's shape; ``big``, Llama-2-7B by blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fp8compile
from benchmarks.first.measuring import Measure, gib
from benchmarks.first.speaking import Told
from benchmarks.first.ways import by_torchao, compiled, ours
from benchmarks.harness.llama import LLAMA2_7B, TINY, Llama, Shape, initialised, rotary_tables

SIX_LAYERS = Shape(2048, 8192, 32, 8, 6, 32000)
STATES = {"ours": "e4m3_expanded", "int8": "int8_companded"}


class Training:
    """A model, its tokens and its optimizer, on the device."""

    def __init__(self, measure: Measure, shape: Shape, batch: int, optimizer: str, by_blocks: str | None) -> None:
        shape, self.batch, self.length = (TINY, 2, 64) if measure.tiny else (shape, batch, 2048)
        torch.manual_seed(0)
        usual = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)  # 7B in FP32 would not fit beside what else is there
        try:
            with measure.device:
                self.model = Llama(shape)
        finally:
            torch.set_default_dtype(usual)
        initialised(self.model)
        with measure.device:
            self.tokens = torch.randint(shape.vocabulary, (self.batch, self.length + 1))
        self.tables = rotary_tables(shape, self.length, measure.device, torch.bfloat16)
        if by_blocks:
            _compile_blocks(by_blocks, self.model, measure.device)
        self.optimizer = _optimizer(optimizer, self.model)
        self.call: Callable[..., Tensor] = self.model

    def forward(self) -> Tensor:
        return self.call(self.tokens, *self.tables)

    def step(self) -> Tensor:
        loss = self.forward()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def forward_backward(self) -> None:
        self.forward().backward()
        self.model.zero_grad(set_to_none=True)

    def measured(self, measure: Measure, rounds: int) -> dict[str, Any]:
        row: dict[str, Any] = measure.times(self.step, rounds, 2)
        row["tokens_s"] = round(self.batch * self.length / row["wall_ms"] * 1e3)
        return row | {"loss": float(self.step()), **gib(measure.peak(self.step))}

    def shape(self) -> dict[str, int]:
        weights = sum(p.numel() for p in self.model.parameters())
        return {"batch": self.batch, "length": self.length, "parameters": weights}


def run(told: Told, way: str, optimizer: str) -> None:
    measure = Measure(told)
    if told.job.startswith("big"):
        training = Training(measure, LLAMA2_7B, 2, optimizer, way)
        measure.compiled(training.step, 1)
        told.say("train7b", shape=training.shape(), **training.measured(measure, 6))
        measure.profiled("train7b", training.step, 1)
        return
    training = Training(measure, SIX_LAYERS, 4, optimizer, None)
    training.call = compiled(way, training.model, measure.device)
    measure.compiled(training.step, 3)
    row = training.measured(measure, 12)
    row["forward_backward_ms"] = measure.times(training.forward_backward, 8, 1)["ms"]
    told.say("train", shape=training.shape(), **row)
    measure.profiled("train", training.step, 2)


def _compile_blocks(way: str, model: Llama, device: torch.device) -> None:
    if way in ("inductor", "torchao"):
        if way == "torchao":
            by_torchao(model, device)
        for block in model.layers:
            block.compile(dynamic=False)
    else:
        fp8compile.compile_blocks(model, ours(way, device), dynamic=False)


def _optimizer(name: str, model: Llama) -> torch.optim.Optimizer:
    if name == "fused":
        return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    return fp8compile.optim.AdamW(model, lr=1e-5, state_format=STATES[name])
