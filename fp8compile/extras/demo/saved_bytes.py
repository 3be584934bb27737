"""Bytes that a step of the demo saves for backward (fp8compile/tools/step_memory.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp8compile.tools.step_memory import saved_bytes


def saved_bytes_of_step(step_model: Callable[..., Any], model: torch.nn.Module, tokens: Tensor) -> int:
    """``saved_bytes`` of one batch through ``step_model``, whose parameters are ``model``'s."""

    def forward() -> Tensor:
        loss: Tensor = step_model(input_ids=tokens, labels=tokens).loss
        return loss

    return saved_bytes(forward, [*model.parameters(), *model.buffers(), tokens])
