"""Script: what one more layer of a deep model moves and launches. Prints JSON.

A layer alone (run_layers.py) has no neighbour to share its residual with. Here a stack of ``DEPTHS`` layers is lowered, and
the difference is divided by the layers between.

``python -m tests.sm90.run_depth --all > benchmarks/results/depth-sm90-lowered.json``; without ``--all``, one pipeline.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from . import fake_h100
from .layers import BOTH, CASES, CONSERVATIVE, PLAIN, STORAGE, Layer
from .lowering import LoweredGraph, lower
from .measures import print_json
from .on_cuda import JOINT_PASS, to_cuda
from .run_layers import backend_of
from .run_linears import LABEL

DEPTHS = (2, 4)
ALL = {case: (PLAIN, STORAGE, CONSERVATIVE, BOTH) for case in ("llama 16k", "vit 16k")}
LOWERED = {"llama 16k": (CONSERVATIVE,)}


class Stack(nn.Module):
    """Layers one behind the other; what they share is given to each."""

    def __init__(self, layer: Layer, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer.build("meta") for _ in range(depth))

    def forward(self, x: Tensor, *shared: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, *shared)
        return x


def lowered(layer: Layer, depth: int, pipeline: str) -> list[LoweredGraph]:
    """Forward and backward of a stack in BF16."""
    module = Stack(layer, depth).bfloat16().to_empty(device="cpu")
    args = layer.arguments(lambda *shape: torch.empty(shape, dtype=torch.bfloat16))
    backend = backend_of(pipeline)
    return lower(module, *args, backward=True, backend=backend, config_patches={JOINT_PASS: to_cuda}).graphs


def one_more(layer: Layer, pipeline: str) -> list[dict[str, Any]]:
    """For forward and backward: units moved and kernels launched by one more layer, different kernels at each depth."""
    few, many = (lowered(layer, depth, pipeline) for depth in DEPTHS)
    between = DEPTHS[1] - DEPTHS[0]
    return [
        {
            "units": (more.num_bytes - less.num_bytes) / layer.unit / between,
            "launches": (len(more.launches) - len(less.launches)) / between,
            "kernels": [len(set(graph.launches)) for graph in (less, more)],
        }
        for less, more in zip(few, many, strict=True)
    ]


def report(cases: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """``{case: {pipeline: [forward, backward]}}``, and what was lowered by what."""
    fake_h100.install()
    found = {
        case: {pipeline: one_more(CASES[case], pipeline) for pipeline in pipelines}
        for case, pipelines in cases.items()
    }
    versions = {**fake_h100.installed(), "target": "sm_90 (mocked)"}
    return {"label": LABEL, "versions": versions, "depths": DEPTHS, "cases": found}


if __name__ == "__main__":
    print_json(lambda: report(ALL if "--all" in sys.argv else LOWERED))
