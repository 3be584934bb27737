"""Script: lower layers of which codes wait on the host, forward and backward, for an H100. Prints JSON."""

from __future__ import annotations

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


def wrappers(**fields: Any) -> list[str]:
    """The generated code of forward and backward."""
    _, args = LAYER.empty()
    model = Stack().bfloat16().to_empty(device="cpu")
    backend = fp8compile_backend(Recipe(observe=False, **fields))
    lowered = lower(model, *args, backward=True, backend=backend, config_patches={JOINT_PASS: to_cuda})
    return [graph.wrapper for graph in lowered.graphs]


def report() -> dict[str, list[str]]:
    fake_h100.install()
    return {
        name: wrappers(offload=offload, linear=linear)
        for name, offload, linear in (("off", "off", "off"), ("auto", "auto", "off"), ("all", "all", "off"))
    }


if __name__ == "__main__":
    print_json(report)
