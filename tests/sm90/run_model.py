"""Script: lower a SwiGLU block, forward and backward, as ``torch.compile`` does. Prints JSON."""

from __future__ import annotations

from typing import Any

import torch

from . import fake_h100, swiglu
from .lowering import Backend, lower, stock_backend
from .measures import measured, print_json


def training_graphs(
    config_patches: dict[str, Any] | None = None, backend: Backend = stock_backend
) -> list[dict[str, Any]]:
    """Measures of forward and backward; ``config_patches`` are Inductor's options, passes among them."""
    x = torch.empty(swiglu.TOKENS, swiglu.HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    lowered = lower(swiglu.SwiGLU(), x, backward=True, backend=backend, config_patches=config_patches)
    return [measured(graph, assembled=False) for graph in lowered.graphs]


def report() -> dict[str, list[dict[str, Any]]]:
    """``{pipeline: [forward, backward]}``."""
    fake_h100.install()
    return {"inductor": training_graphs()}


if __name__ == "__main__":
    print_json(report)
