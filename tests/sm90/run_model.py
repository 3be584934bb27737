"""Script: lower a SwiGLU block, forward and backward, as ``torch.compile`` does. Prints JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch.fx import GraphModule

from fp8compile import _torch as private
from fp8compile.compiler.backend import compile_graph
from fp8compile.recipe.recipe import OF_THE_DEVICE, Recipe

from . import fake_h100, swiglu
from .lowering import Backend, InnerCompile, lower, stock_backend
from .measures import measured, print_json


def fp8compile_backend(recipe: Recipe) -> Backend:
    """The real backend, but for what generates the kernels. Codes have no price where the recipe names no device's rates."""
    if recipe.debug.device_rates == OF_THE_DEVICE and recipe.saved.max_cost == "auto":
        recipe = recipe.replace_in_all({"saved.max_cost": "any"})

    def backend(gm: GraphModule, inputs: Sequence[Any], inner: InnerCompile) -> Any:
        with mock.patch.object(private, "compile_fx_inner", inner):
            return compile_graph(gm, inputs, recipe)

    return backend


def training_graphs(
    config_patches: dict[str, Any] | None = None, backend: Backend = stock_backend, x_takes_gradient: bool = False
) -> list[dict[str, Any]]:
    """Measures of forward and backward; ``config_patches`` are Inductor's options, passes among them."""
    x = torch.empty(swiglu.TOKENS, swiglu.HIDDEN, dtype=torch.bfloat16, requires_grad=x_takes_gradient)
    lowered = lower(swiglu.SwiGLU(), x, backward=True, backend=backend, config_patches=config_patches)
    return [measured(graph, assembled=False) for graph in lowered.graphs]


def report() -> dict[str, list[dict[str, Any]]]:
    """``{pipeline: [forward, backward]}``: plain Inductor, the same cut but kept in BF16, and what we do."""
    fake_h100.install()
    ours = fp8compile_backend(Recipe())
    with private.inductor_config.patch(disabled_passes="encode_saved"):
        same_cut_in_bf16 = training_graphs(backend=ours)
    return {
        "inductor": training_graphs(),
        "same cut in BF16": same_cut_in_bf16,
        "fp8compile": training_graphs(backend=ours),
        "fp8compile, input kept too": training_graphs(backend=ours, x_takes_gradient=True),
        "inductor, input kept too": training_graphs(x_takes_gradient=True),
    }


if __name__ == "__main__":
    print_json(report)
