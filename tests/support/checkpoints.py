"""Optimizers that have trained a while, their states, and a way through a file."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fp8compile import optim

SHAPES = {"weight": (67, 130), "conv": (10, 64, 3, 3), "long": (5000,), "bias": (67,), "scale": ()}

ENCODED = ("weight", "conv", "long")  # at least 4096 elements

KINDS: dict[str, tuple[type[optim.EncodedOptimizer], dict[str, Any]]] = {
    "AdamW": (optim.AdamW, {}),
    "Adam": (optim.Adam, {"weight_decay": 0.1}),
    "amsgrad": (optim.AdamW, {"amsgrad": True, "state_format": "fp32"}),
    "Lion": (optim.Lion, {}),
    "SGD": (optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    "SGD without momentum": (optim.SGD, {}),
    "RMSprop": (optim.RMSprop, {"momentum": 0.5}),
    "centered": (optim.RMSprop, {"centered": True, "state_format": "fp32"}),
    "LAMB": (optim.LAMB, {}),
}

ONE_FOR_BOTH = ("e4m3_expanded", "e5m2_expanded", "dynamic_tree", "int8_companded", "e4m3", "e5m2", "int8")
PAIRS = [*ONE_FOR_BOTH, "bf16", "fp32", "4bit", ("dynamic4", "rank1_linear4"), ("dynamic_tree", "e4m3_expanded")]


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=random).to(dtype)))


def of(kind: str, net: nn.Module, **options: Any) -> optim.EncodedOptimizer:
    cls, defaults = KINDS[kind]
    return cls(net, lr=1e-2, compiled=False, **(defaults | options))  # type: ignore[call-arg]


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 1) -> None:
    random = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in net.parameters():
            p.grad = torch.randn(p.shape, generator=random).to(p.dtype)
        optimizer.step()


def trained(kind: str = "AdamW", dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Net, Any]:
    net = Net(dtype)
    optimizer = of(kind, net, **options)
    train(net, optimizer, 3)
    return net, optimizer


def raw(value: Any) -> Any:
    """Something that is equal where every bit is."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape, value.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
    if isinstance(value, Mapping):
        return {key: raw(each) for key, each in value.items()}
    return [raw(each) for each in value] if isinstance(value, (list, tuple)) else value


def everything(net: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return raw([dict(net.named_parameters()), torch.optim.Optimizer.state_dict(optimizer)])


def through_a_file(state_dict: Any) -> Any:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def decoded(optimizer: optim.EncodedOptimizer) -> list[dict[str, Tensor]]:
    """The FP32 states, parameter by parameter."""
    return [
        optimizer.plan_of(p, group).decoded(optimizer.state[p], p.shape)
        for group in optimizer.param_groups
        for p in group["params"]
    ]


STOCK: dict[str, type[torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "Adam": torch.optim.Adam,
    "amsgrad": torch.optim.AdamW,
    "SGD": torch.optim.SGD,
    "SGD without momentum": torch.optim.SGD,
    "RMSprop": torch.optim.RMSprop,
    "centered": torch.optim.RMSprop,
}

UNCORRECTED = ("SGD", "SGD without momentum", "RMSprop", "centered")


def stock(kind: str, net: nn.Module) -> torch.optim.Optimizer:
    options = {key: value for key, value in KINDS[kind][1].items() if key != "state_format"}
    return STOCK[kind](net.parameters(), lr=1e-2, **options)  # type: ignore[call-arg]


CODES, AMAX, K = (f"exp_avg.e4m3_expanded.{part}" for part in ("codes", "amax", "k"))
