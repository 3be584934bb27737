"""Script: rows that are looked up by what was looked up, and normalised in two loops, lowered for an H100. Prints what Triton
refuses, as JSON."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fp8compile.recipe.recipe import Recipe

from . import fake_h100
from .assembling import assemble
from .lowering import lower, stock_backend
from .measures import print_json
from .on_cuda import JOINT_PASS, to_cuda
from .run_model import fp8compile_backend

BATCH, SEQ, WIDTH = 4, 64, 2048


class LookedUp(nn.Module):
    """As BERT's embeddings: kinds of tokens by their places, and a row of a table for each kind. Without a backward, which
    would read the kinds, and so have plain Inductor store them."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.Embedding(2, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("kind_of", torch.zeros(1, SEQ, dtype=torch.int64))

    def forward(self, places: Tensor) -> Tensor:
        kinds = self.kind_of.expand(places.shape[0], -1).gather(1, places)
        return self.norm(self.kinds(kinds))  # type: ignore[no-any-return]


def refused(backend: Any) -> list[str]:
    """What Triton says of kernels that it refuses."""
    places = torch.zeros(BATCH, SEQ, dtype=torch.int64)
    graphs = lower(LookedUp(), places, backend=backend, config_patches={JOINT_PASS: to_cuda}).graphs
    found = []
    for kernel in (kernel for graph in graphs for kernel in graph.kernels.values()):
        try:
            list(assemble([kernel]))
        except Exception as error:  # Triton's errors have no common class but this
            found.append(str(error).splitlines()[-1])
    return found


def report() -> dict[str, list[str]]:
    fake_h100.install()
    return {"plain": refused(stock_backend), "ours": refused(fp8compile_backend(Recipe()))}


if __name__ == "__main__":
    print_json(report)
