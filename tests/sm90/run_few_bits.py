"""Script: lower a Llama layer whose saved values have 8 bits, or few, and assemble the latter. Prints JSON."""

from __future__ import annotations

import sys
from typing import Any

from fp8compile.recipe.recipe import Recipe

from . import fake_h100
from .layers import CASES, STORAGE
from .measures import print_json
from .run_layers import backend_of, described, lowered_layer
from .run_model import fp8compile_backend

CASE = "llama 16k"
ALONE = "4bit"
FEW = {ALONE: Recipe(linears="off", saved="4bit")}


def report(names: tuple[str, ...] = (STORAGE, *FEW)) -> dict[str, list[dict[str, Any]]]:
    """``{pipeline: forward and backward, each with launches, bytes and what the assembler said}``."""
    fake_h100.install()
    found = {}
    for name in names:
        backend = fp8compile_backend(FEW[name]) if name in FEW else backend_of(name)
        graphs = lowered_layer(CASES[CASE], backend)
        found[name] = [described(graph, assembled=name in FEW) for graph in graphs]
    return found


if __name__ == "__main__":
    print_json(lambda: report(tuple(sys.argv[1:]) or (STORAGE, *FEW)))
