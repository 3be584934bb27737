"""Training steps of whole models: how each arm compiles the model and which optimizer it has.

Parameters and gradients are BF16 in every arm; arms differ in what computes, what is kept and in the optimizer's states:

    inductor                   torch.compile; torch's fused AdamW, whose moments are BF16 like the parameters
    inductor, FP32 moments     the same with moments as most people train; they are ours without codes
    torchao                    float8 linears, AdamWFp8
    ours                       the default recipe, AdamW with ``e4m3_expanded`` states
    ours, gradients released   each parameter updated in the backward, its gradient dropped at once
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import peers
from benchmarks.harness.llama import Llama, Shape, initialised, rotary_tables
from benchmarks.harness.timing import Lap
from fp8compile import optim

Compiler = Callable[[Llama, torch.device], Callable[..., Tensor]]
Optimizer = Callable[[Llama], Any]
RATE = 1e-5  # weights must stay where they are meaningful, nothing more


@dataclass(frozen=True)
class Arm:
    """How a model is compiled, and its optimizer."""

    compiler: Compiler
    optimizer: Optimizer
    released: bool = False


def _torch_adamw(model: Llama) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)


def _adamw(**options: Any) -> Optimizer:
    return lambda model: optim.AdamW(model, lr=RATE, **options)


def _torchao_adamw(model: Llama) -> torch.optim.Optimizer:
    from torchao.optim import AdamWFp8

    return AdamWFp8(model.parameters(), lr=RATE)  # type: ignore[no-any-return]


def _ours(model: Llama, device: torch.device) -> Callable[..., Tensor]:
    return peers.ours(model, device)


def _inductor(model: Llama, device: torch.device) -> Callable[..., Tensor]:
    return peers.inductor(model)


ARMS = {
    "ours": Arm(_ours, _adamw()),
    "inductor": Arm(_inductor, _torch_adamw),
    "ours, gradients released": Arm(_ours, _adamw(), released=True),
    "ours, storage only": Arm(lambda model, device: peers.ours(model, device, linears="off"), _adamw()),
    "inductor, FP32 moments": Arm(_inductor, _adamw(state_format="fp32")),
    "torchao": Arm(lambda model, device: peers.torchao_float8(model), _torchao_adamw),
}


class Trainer:
    """A model, its optimizer and a batch of random tokens; ``step`` is one training step."""

    def __init__(self, shape: Shape, arm: Arm, batch: int, length: int, device: torch.device) -> None:
        with device:
            self.model: Any = initialised(Llama(shape).to(torch.bfloat16))
            self.tokens = torch.randint(shape.vocabulary, (batch, length + 1))
        torch.cuda.empty_cache()  # the FP32 weights that the model was made with
        self.tables = rotary_tables(shape, length, device, torch.bfloat16)
        self.call = arm.compiler(self.model, device)
        self.optimizer = arm.optimizer(self.model)
        self.released = arm.released
        if arm.released:
            self.optimizer.release_gradients(self.model)

    def forward(self) -> Tensor:
        return self.call(self.tokens, *self.tables)

    def step(self, lap: Lap) -> None:
        loss = self.forward()
        lap("forward")
        loss.backward()
        lap("backward")
        if not self.released:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        lap("optimizer")
