"""Script: lower a deep Llama under memory budgets: the peak of the buffers in what is generated, and the predicted one.

Prints JSON: ``{storage: {budget: {"predicted": bytes, "forward": bytes, "backward": bytes}}}``.
"""

from __future__ import annotations

import torch

from fp8compile.compiler.generated_memory import peak_bytes
from fp8compile.recipe.recipe import Recipe
from fp8compile.reporting.entries import Notes
from tests.support.budgets import Llama, noted

from . import fake_h100
from .lowering import LoweredGraph, lower
from .measures import print_json
from .on_cuda import JOINT_PASS, to_cuda
from .run_model import fp8compile_backend

LAYERS, HIDDEN, FFN = 6, 256, 704
SEQUENCES = 64  # of 64 tokens
STORAGES = ("off", "groupwise")
BUDGETS = (10**12, 0.7, 0.5, 0.35)


def peak_of(graph: LoweredGraph, is_backward: bool) -> int:
    """The peak of what a graph allocates and, in the backward, of what was kept for it; parameters and data not counted."""
    assert graph.graph is not None
    inputs = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    kept = [name for name in inputs if is_backward and not name.startswith("primals")]
    return peak_bytes(graph.wrapper, graph.sizes, kept)


def lowered(storage: str, budget: float) -> dict[str, int]:
    torch.manual_seed(0)
    model = Llama(LAYERS, HIDDEN, FFN).bfloat16()
    x = torch.empty(SEQUENCES, 64, HIDDEN, dtype=torch.bfloat16)
    backend = fp8compile_backend(Recipe(linears="off", saved=storage, memory=budget))
    notes: list[Notes] = []
    with noted(notes):
        graphs = lower(model, x, backward=True, backend=backend, config_patches={JOINT_PASS: to_cuda}).graphs
    (told,) = notes[0].budgets
    forward, backward = (
        peak_of(graph, is_backward) for graph, is_backward in zip(graphs, (False, True), strict=True)
    )
    return {"predicted": told.frontier[told.chosen].peak, "forward": forward, "backward": backward}


def report() -> dict[str, dict[str, dict[str, int]]]:
    fake_h100.install()
    return {storage: {str(budget): lowered(storage, budget) for budget in BUDGETS} for storage in STORAGES}


if __name__ == "__main__":
    print_json(report)
