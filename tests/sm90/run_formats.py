"""Script: lower a Llama layer in formats of benchmarks/studies/formats.py, forward and backward. Prints JSON.

The layer is run_linears.py's. What a GPU multiplies as codes is not emulated here.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.studies.formats import PLAIN, ROWS, Options
from fp8compile.recipe.recipe import Recipe

from . import fake_h100
from .externs import ExternCall, bytes_and_calls
from .linears import UNIT
from .lowering import LoweredGraph, stock_backend
from .measures import print_json
from .run_linears import lowered_layer
from .run_model import fp8compile_backend

PRODUCTS = ("_scaled_mm", "_int_mm", "mm", "addmm")
AS_CODES = ("tensorwise", "rowwise", "int8")  # values of Recipe.linears.mode that sm_90 has products for


def recipe_of(options: Options) -> Recipe:
    """The row's recipe, emulated only where no product of an H100 takes its codes."""
    codes = options.get("linears", "tensorwise") in AS_CODES
    return Recipe.preset(
        options["preset"], **{k: v for k, v in options.items() if k != "preset" and not (codes and k == "emulate")}
    )


def described(graph: LoweredGraph) -> dict[str, Any]:
    """Launches of a graph, the bytes that they move, extern calls, and the bytes of those."""
    num_bytes, calls = bytes_and_calls(graph)
    return {
        "launches": len(graph.launches),
        "num_bytes": num_bytes,
        "externs": len(calls),
        "extern_bytes": sum(call.num_bytes for call in calls),
        "products": [_product(call) for call in calls if call.name in PRODUCTS],
    }


def _product(call: ExternCall) -> list[Any]:
    """A product's name, its operands and its result, each ``[dtype, shape, stride]``."""
    return [call.name, *([o.dtype, o.shape, o.stride] for o in (*call.operands, *call.results) if o)]


def report(names: tuple[str, ...]) -> dict[str, Any]:
    """``{row: [forward, backward]}``, and what was lowered by what."""
    fake_h100.install()
    backends = {name: fp8compile_backend(recipe_of(ROWS[name])) for name in names if name != PLAIN}
    found = {name: [described(graph) for graph in lowered_layer(backends.get(name, stock_backend))] for name in names}
    return {"versions": {**fake_h100.installed(), "target": "sm_90 (mocked)"}, "unit_bytes": UNIT, "rows": found}


if __name__ == "__main__":
    print_json(lambda: report(tuple(sys.argv[1:]) or (PLAIN, *ROWS)))
