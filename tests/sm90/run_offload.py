"""Script: lower layers of which codes wait on the host, forward and backward, for an H100. Prints JSON."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, nn

from fp8compile.recipe.recipe import Recipe

from . import fake_h100
from .layers import Layer
from .lowering import lower
from .measures import print_json
from .on_cuda import JOINT_PASS, to_cuda
from .run_model import fp8compile_backend

LAYER, DEPTH = Layer("llama", 1, 2048, hidden=1024, ffn=2816, heads=8), 4


class Stack(nn.Module):
    """Several of the layer, one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LAYER.build("meta") for _ in range(DEPTH))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x


def calls(wrapper: str) -> list[str]:
    """What the generated code does, line by line, without the sources of kernels."""
    body = re.sub(r"'''.*?'''", "", wrapper, flags=re.DOTALL).split("def call(")[1]
    return [line.strip() for line in body.splitlines()]


def lowered(offload: str) -> list[list[str]]:
    """The calls of the generated forward and backward."""
    _, args = LAYER.empty()
    model = Stack().bfloat16().to_empty(device="cpu")
    backend = fp8compile_backend(Recipe(fp32={"observe": False}, linears="off", memory={"offload": offload}))
    found = lower(model, *args, backward=True, backend=backend, config_patches={JOINT_PASS: to_cuda})
    return [calls(graph.wrapper) for graph in found.graphs]


def report() -> dict[str, Any]:
    """``{offload: [calls of the forward, calls of the backward]}``."""
    fake_h100.install()
    return {offload: lowered(offload) for offload in ("off", "auto", "all")}


if __name__ == "__main__":
    print_json(report)
