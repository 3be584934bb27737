"""Steps of small models as one graph of forward, loss and backward, marked as torchtitan's graph_trainer marks its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fp8compile.integrations.overwriting import BACKWARD

aten = torch.ops.aten
Loss = Callable[[Callable[..., Tensor], Tensor], Any]


class Block(nn.Module):
    """A norm, a nonlinearity between two linears, and a sum: each saves something of another kind."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


def whole_loss(model: Callable[..., Tensor], x: Tensor) -> Tensor:
    return model(x).square().mean()


def step_of(model: nn.Module, x: Tensor, loss: Any = whole_loss, mode: str = "fake") -> tuple[GraphModule, list[Any]]:
    """The graph of ``[loss, *gradients]``, and what it is called with: parameters and ``x``."""
    names, parameters = zip(*((n, p.detach().requires_grad_()) for n, p in model.named_parameters()), strict=True)

    def step(*inputs: Tensor) -> list[Tensor]:
        given = dict(zip(names, inputs, strict=False))
        value = loss(lambda y: torch.func.functional_call(model, given, (y,)), inputs[-1])
        return [value, *torch.autograd.grad(value, inputs[:-1])]

    gm = make_fx(step, tracing_mode=mode)(*parameters, x)
    mark_backward(gm)
    return gm, [*parameters, x]


def mark_backward(gm: GraphModule) -> None:
    """What follows the first gradient of a loss is of the backward, and all is of one module."""
    after = False
    for node in gm.graph.nodes:
        if node.op == "call_function":
            node.meta["custom"] = {"module_fqn": "layers.0"}
            if after:
                node.meta[BACKWARD] = True
            after |= node.target is aten.ones_like.default


def decibels(exact: Tensor, other: Tensor) -> float:
    noise = float((exact - other).double().square().sum())
    return math.inf if not noise else 10 * math.log10(float(exact.double().square().sum()) / noise)
