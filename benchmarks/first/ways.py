"""The ways that a model is compiled in, by the names that plans use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "storage": {"linears": "off"},
    "linears": {"linears": "tensorwise", "saved": "off"},
    "delayed": {"linears.scaling": "delayed", "linears.cache_weights": True},
    "merged": {"linears.scaling": "delayed", "linears.cache_weights": True, "linears.merge_dgrads": True},
    "noattn": {"saved.attention": False},
    "codes": {"saved.max_cost": "any"},
    "speed": {"preset": "speed"},
    "rowwise": {"linears": "rowwise"},
    "off": {"preset": "off"},
}
OTHERS = ("eager", "inductor", "torchao")


def ours(way: str, device: torch.device) -> dict[str, Any]:
    """Options of a way of ours; a CPU emulates FP8.

    Raises:
        ValueError: there is no such way.
    """
    if way not in OPTIONS:
        raise ValueError(f"{way!r} is no way to compile. Fix: one of {', '.join((*OTHERS, *OPTIONS))}.")
    return {**({} if device.type == "cuda" else {"linears.emulate": True}), **OPTIONS[way]}


def compiled(way: str, model: nn.Module, device: torch.device) -> Callable[..., Any]:
    """The model, called that way."""
    if way == "eager":
        return model
    if way == "inductor":
        return torch.compile(model, dynamic=False)
    if way == "torchao":
        return torch.compile(by_torchao(model, device), dynamic=False)
    return torch.compile(model, backend="fp8compile", dynamic=False, options=ours(way, device))


def by_torchao(model: nn.Module, device: torch.device) -> nn.Module:
    """Linears of multiples of 16 in FP8, but for the head."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def wanted(module: nn.Module, name: str) -> bool:
        return not name.endswith("lm_head") and module.in_features % 16 == 0 and module.out_features % 16 == 0

    config = Float8LinearConfig(emulate=device.type != "cuda")
    return convert_to_float8_training(model, module_filter_fn=wanted, config=config)
