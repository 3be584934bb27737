"""Script: lower an FP16 Llama layer, forward and backward, with and without its values observed. Prints JSON.

``python -m tests.sm90.run_observed > benchmarks/results/observed-sm90-lowered.json`` writes the figures down.
"""

from __future__ import annotations

from typing import Any

import torch

from fp8compile.recipe.recipe import Recipe
from tests.support.measure import llama_case

from . import fake_h100
from .externs import bytes_and_calls
from .lowering import LoweredGraph, lower
from .measures import measured, print_json
from .on_cuda import JOINT_PASS, to_cuda
from .run_model import fp8compile_backend

BATCH, SEQ, HIDDEN, FFN, HEADS = 8, 2048, 4096, 11008, 32
RECIPES = {
    "off": Recipe(linears="off", fp32={"observe": False}),
    "on": Recipe(linears="off"),
}


def lowered_layer(recipe: Recipe) -> list[LoweredGraph]:
    """Forward and backward of the layer, the joint graph on fake cuda tensors."""
    layer, args = llama_case(BATCH, SEQ, HIDDEN, FFN, HEADS, dtype=torch.float16)
    backend = fp8compile_backend(recipe)
    return lower(layer, *args, backward=True, backend=backend, config_patches={JOINT_PASS: to_cuda}).graphs


def described(graph: LoweredGraph) -> dict[str, Any]:
    num_bytes, calls = bytes_and_calls(graph)
    return measured(graph, assembled=False) | {
        "num_bytes": num_bytes,
        "bytes_by_launch": [[name, graph.kernels[name].num_bytes] for name in graph.launches],
        "extern_bytes": sum(call.num_bytes for call in calls),
    }


def report() -> dict[str, Any]:
    """``{"graphs": {"off" | "on": [forward, backward]}}``."""
    fake_h100.install()
    case = {"batch": BATCH, "seq": SEQ, "hidden": HIDDEN, "ffn": FFN, "heads": HEADS, "dtype": "float16"}
    return {
        "label": "lowered without a GPU; bytes are counted from generated code, not measured",
        "versions": {**fake_h100.installed(), "target": "sm_90 (mocked)"},
        "case": case,
        "graphs": {name: [described(graph) for graph in lowered_layer(recipe)] for name, recipe in RECIPES.items()},
    }


if __name__ == "__main__":
    print_json(report)
