"""Models under a memory budget, and the halves and steps that come of it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8compile.compiler import pipeline
from fp8compile.fx.partition import PartitionedGraph
from fp8compile.memory.frontier import Frontier, State
from fp8compile.passes.recompute_for_budget import recompute_for_budget
from fp8compile.recipe.context import Context
from fp8compile.reporting.budget import Budget
from fp8compile.reporting.entries import Notes
from tests.support.graphs import split_of
from tests.support.measure import LlamaLayer

PLAIN = {"preset": "off", "debug.codegen": "eager"}
BUDGETS = [i / 20 for i in range(20, 0, -1)]
EXACT = 120.0  # dB: FP32, equal but for the order of a sum


class Steps(nn.Module):
    """Linears with a tanh between them: what is kept is each tanh, or made again by a matmul."""

    def __init__(self, count: int = 2, size: int = 64) -> None:
        super().__init__()
        self.steps = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = torch.tanh(step(x))
        return x


class Llama(nn.Module):
    def __init__(self, layers: int = 3, hidden: int = 64, ffn: int = 176) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LlamaLayer(hidden, ffn, 4) for _ in range(layers))
        self.tables = nn.Buffer(torch.randn(2, 64, hidden // 4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, *self.tables)
        return x


class Encoder(nn.Module):
    """BERT-style layers with attention written by hand, layer norms, biases and GELU."""

    def __init__(self, layers: int = 2, hidden: int = 64) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(hidden, 3 * hidden) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers))
        self.mlp = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(hidden), nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden)
            )
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for qkv, out, mlp in zip(self.qkv, self.out, self.mlp, strict=True):
            q, k, v = (t.view(*x.shape[:2], 4, -1).transpose(1, 2) for t in qkv(x).chunk(3, -1))
            x = x + out(((q @ k.mT * 0.25).softmax(-1) @ v).transpose(1, 2).reshape(x.shape))
            x = x + mlp(x)
        return x


class Gated(nn.Module):
    """The deep model of pytorch issue 197838 without its attention: residual layers silu(gate) * up, narrow and many."""

    def __init__(self, layers: int = 32, size: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList(
                nn.Linear(i, o, bias=False) for i, o in ((size, 3 * size), (size, 3 * size), (3 * size, size))
            )
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for gate, up, down in self.layers:  # type: ignore[misc]
            x = x + down(F.silu(gate(x)) * up(x))
        return x


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(m for _ in range(4) for m in (nn.Conv2d(16, 16, 3, padding=1), nn.SiLU())))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


Case = tuple[nn.Module, Tensor]


CASES: dict[str, Callable[[], Case]] = {
    "steps": lambda: (Steps(8), torch.randn(128, 64)),
    "llama": lambda: (Llama(), torch.randn(2, 64, 64)),
    "encoder": lambda: (Encoder(), torch.randn(2, 64, 64)),
    "convolutions": lambda: (Convolutions(), torch.randn(2, 16, 16, 16)),
}


def case_of(name: str) -> Case:
    torch.manual_seed(0)
    return CASES[name]()


def step(model: nn.Module, x: Tensor, **options: Any) -> dict[str, Tensor]:
    """The output and all gradients of one training step, of a copy of the model."""
    model = copy.deepcopy(model)
    torch.manual_seed(1)
    torch._dynamo.reset()
    out = torch.compile(model, backend="fp8compile", options=options)(x)
    out.float().square().mean().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"output": out.detach(), **found}


@contextlib.contextmanager
def noted(notes: list[Notes]) -> Iterator[None]:
    """What ``recompute_for_budget`` notes meanwhile goes into ``notes``."""

    def recompute_for_budget_noted(split: PartitionedGraph, ctx: Context) -> Notes:
        notes.append(recompute_for_budget(split, ctx))
        return notes[-1]

    passes = tuple(
        dataclasses.replace(each, run=functools.wraps(recompute_for_budget)(recompute_for_budget_noted))
        if each.run is recompute_for_budget else each for each in pipeline.PIPELINE
    )  # fmt: skip
    with mock.patch.object(pipeline, "PIPELINE", passes):
        yield


def split_under(
    budget: float | str, model: nn.Module, x: Tensor, notes: list[Notes], **options: Any
) -> PartitionedGraph:
    """The halves under a budget; what the pass noted goes into ``notes``."""
    with noted(notes):
        torch._dynamo.reset()
        return split_of(model, x, memory=budget, **options)


def budget_of(model: nn.Module, x: Tensor, budget: float, **options: Any) -> tuple[Budget, PartitionedGraph]:
    notes: list[Notes] = []
    split = split_under(budget, model, x, notes, **options)
    (told,) = notes[0].budgets
    return told, split


def states_of(model: nn.Module, *args: Tensor, **options: Any) -> list[State]:
    """The frontier of a model."""
    found: list[State] = []
    states = Frontier.states

    def caught(self: Frontier) -> list[State]:
        found.extend(states(self))
        return found

    with mock.patch.object(Frontier, "states", caught):
        torch._dynamo.reset()
        split_of(model, *args, memory=0.0, **{**PLAIN, **options})
    return found
