"""What the scripts report of a lowered graph, as JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .assembling import assemble
from .checked import instructions
from .lowering import LoweredGraph


def measured(graph: LoweredGraph, *, assembled: bool = True, counted: bool = False) -> dict[str, Any]:
    """Launches, externs, bytes and, of every configuration of every kernel, what the assembler said; if ``counted``, its
    instructions as they stand."""
    cubins = [dataclasses.asdict(cubin) for cubin in assemble(graph.kernels.values())] if assembled else []
    for cubin in cubins:
        code = cubin.pop("code")
        del cubin["ptx"]
        if counted:
            cubin["instructions"] = instructions(code).total()
    return {
        "launches": graph.launches,
        "externs": graph.externs,
        "num_bytes": graph.num_bytes,
        "estimated_bytes": graph.estimated_bytes,
        "cubins": cubins,
    }


def given(graph: LoweredGraph) -> list[Tensor]:
    """What a backward takes of the forward's making: no parameters, no inputs, no gradients."""
    assert graph.graph is not None
    inputs = graph.graph.find_nodes(op="placeholder")
    made = [node.meta["val"] for node in inputs if not node.name.startswith(("primals", "tangents"))]
    return [value for value in made if isinstance(value, Tensor)]


def print_json(report: Callable[[], Any]) -> None:
    """Print what ``report`` returns; whatever else it prints goes to stderr."""
    with contextlib.redirect_stdout(sys.stderr):
        result = report()
    json.dump(result, sys.stdout, indent=1)
