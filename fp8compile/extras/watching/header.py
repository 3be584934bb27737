"""The first line of a run: what runs, with which recipe, versions and hardware."""

from __future__ import annotations

import platform
import time
import uuid
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fp8compile._version import __version__
from fp8compile.amp.scaler import LossScaler
from fp8compile.extras.watching.lines import SCHEMA
from fp8compile.extras.watching.memory import device_of
from fp8compile.recipe.rates import device_name
from fp8compile.tools.compiled_module import active_recipes


def rank_and_world() -> tuple[int, int]:
    """This process's rank and how many there are; (0, 1) where torch.distributed is not in use."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def header_of(model: nn.Module, scaler: LossScaler | None, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """See ``lines`` for what a header is."""
    rank, world = rank_and_world()
    whole = getattr(model, "_orig_mod", model)
    device = device_of(model)
    return {
        "schema": SCHEMA,
        "session": uuid.uuid4().hex[:8],
        "time": round(time.time(), 3),
        "rank": rank,
        "world": world,
        "model": type(whole).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "recipe": "; ".join(sorted(map(str, active_recipes(model)))) or "not compiled by fp8compile",
        "optimizer": None if optimizer is None else type(optimizer).__name__,
        "scaler": None if scaler is None else scaler.mode,
        "device": device_name(device),
        "versions": {"fp8compile": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }
