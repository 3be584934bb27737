"""Script: lower and assemble SwiGLU both ways, for every way of storing gate and up. Prints JSON."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import fake_h100, swiglu
from .lowering import lower
from .measures import measured, print_json


def empty(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def report() -> dict[str, dict[str, Any]]:
    """``{"forward" | "backward": {how gate and up are stored: measures}}``."""
    fake_h100.install()
    tokens, hidden, intermediate = swiglu.TOKENS, swiglu.HIDDEN, swiglu.INTERMEDIATE
    inputs = empty(tokens, hidden), empty(hidden, intermediate), empty(hidden, intermediate)
    g, u, dz = (empty(tokens, intermediate) for _ in range(3))
    result = {
        "forward": {swiglu.BF16: measured(lower(swiglu.forward(None), *inputs).only)},
        "backward": {swiglu.BF16: measured(lower(swiglu.backward(None), g, u, dz).only)},
    }
    for name, codec in swiglu.CODECS.items():
        with torch.device("meta"):
            stored = [t for x in (g, u) for t in codec.encode(torch.empty_like(x))]
        stored = [torch.empty(t.shape, dtype=t.dtype) for t in stored]
        result["forward"][name] = measured(lower(swiglu.forward(codec), *inputs).only)
        result["backward"][name] = measured(lower(swiglu.backward(codec), *stored, dz).only)
    return result


if __name__ == "__main__":
    print_json(report)
