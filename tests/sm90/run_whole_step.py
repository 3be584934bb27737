"""Script: lower a whole step whose updates write the codes of the next step's weights. Prints JSON."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8compile
from fp8compile.whole_step import compiling, placing

from . import fake_h100
from .lowering import CUDA, Lowered, LoweredGraph, lower_backend, lowering_config
from .measures import measured, print_json
from .on_cuda import JOINT_PASS, to_cuda

WIDTH, ROWS, LAYERS = 1024, 2048, 2
RECIPE = {"linear": "tensorwise", "cache_weights": True}


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def model() -> nn.Module:
    layers = [(nn.Linear(WIDTH, WIDTH, bias=False), nn.GELU()) for _ in range(LAYERS)]
    return nn.Sequential(*(each for pair in layers for each in pair)).bfloat16()


def fake_on_cuda(tensor: Tensor, mode: Any) -> Tensor:
    with mode:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=CUDA)


def lowered(weight_codes: bool) -> LoweredGraph:
    """A step of two linears in BF16, with AdamW."""
    net = model()
    optimizer = fp8compile.optim.AdamW(net, lr=1e-3, weight_codes=weight_codes)
    found = Lowered()
    with (
        lowering_config({JOINT_PASS: to_cuda}),
        mock.patch.object(compiling.private, "compile_fx_inner", lower_backend(found)),
        mock.patch.object(placing, "fake_of", fake_on_cuda),
    ):
        step = fp8compile.train_step(net, loss_fn, optimizer, recipe=RECIPE, fallback=False)
        step(torch.empty(ROWS, WIDTH, dtype=torch.bfloat16))
    return found.only


def report() -> dict[str, Any]:
    """``{"written" or "not written": measures}`` by whether the updates write codes."""
    fake_h100.install()
    names = {"written": True, "not written": False}
    return {name: measured(lowered(codes)) for name, codes in names.items()}


if __name__ == "__main__":
    print_json(report)
