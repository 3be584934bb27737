"""Script: lower a Llama layer, forward and backward, with FP8 linears, without, and by plain Inductor. Prints JSON.

``python -m tests.sm90.run_linears > benchmarks/results/linears-sm90-lowered.json`` writes the figures down.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.fx import Node

from fp8compile.fx.graph import ENCODING
from fp8compile.numerics.code_forms import CODES_OF, QUANTIZED
from tests.support.measure import llama_case

from . import fake_h100
from .externs import ExternCall, bytes_and_calls
from .linears import BATCH, DEFAULT, FFN, HEADS, HIDDEN, PLAIN, RECIPES, SEQ, UNIT
from .lowering import Backend, LoweredGraph, lower, stock_backend
from .measures import measured, print_json
from .on_cuda import JOINT_PASS, to_cuda
from .run_model import fp8compile_backend

LABEL = "lowered without a GPU; bytes are counted from generated code, not measured"


def lowered_layer(backend: Backend) -> list[LoweredGraph]:
    """Forward and backward of the layer, the joint graph on fake cuda tensors."""
    layer, args = llama_case(BATCH, SEQ, HIDDEN, FFN, HEADS)
    return lower(layer, *args, backward=True, backend=backend, config_patches={JOINT_PASS: to_cuda}).graphs


def described(graph: LoweredGraph, *, assembled: bool) -> dict[str, Any]:
    num_bytes, calls = bytes_and_calls(graph)
    return measured(graph, assembled=assembled) | {
        "num_bytes": num_bytes,
        "bytes_by_launch": [[name, graph.kernels[name].num_bytes] for name in graph.launches],
        "extern_bytes": sum(call.num_bytes for call in calls),
        "products": [product(call) for call in calls if call.name == "_scaled_mm"],
        "attention": [call.name for call in calls if "attention" in call.name],
        "encodings": encodings(graph),
        "code_stores": sum(graph.kernels[name].stores("fp8") for name in graph.launches),
    }


def product(call: ExternCall) -> dict[str, Any]:
    """A product by its operands and its result, each ``[dtype, shape, stride]``."""
    names = ("a", "b", "inv_a", "inv_b", "bias", "scale_result")
    found = dict(zip(names, call.operands, strict=True)) | {"out": call.results[0]}
    return {name: [o.dtype, o.shape, o.stride] if o else None for name, o in found.items()}


def encodings(graph: LoweredGraph) -> list[list[str]]:
    """``[name, dtype]`` of all codes that quantize_linears has computed in this graph."""
    assert graph.graph is not None
    return [[node.name, str(node.meta["val"].dtype)] for node in graph.graph.nodes if _computes_codes(node)]


def _computes_codes(node: Node) -> bool:
    value = node.meta.get("val")
    is_codes = ENCODING in node.meta and isinstance(value, Tensor) and value.element_size() == 1
    return is_codes and node.target in (CODES_OF, QUANTIZED)


def report(names: Sequence[str]) -> dict[str, Any]:
    """``{"graphs": {pipeline: [forward, backward]}}``, and what was lowered by what."""
    fake_h100.install()
    backends = {PLAIN: stock_backend} | {name: fp8compile_backend(recipe) for name, recipe in RECIPES.items()}
    case = {"batch": BATCH, "seq": SEQ, "hidden": HIDDEN, "ffn": FFN, "heads": HEADS, "dtype": "bfloat16"}
    return {
        "label": LABEL,
        "versions": {**fake_h100.installed(), "target": "sm_90 (mocked)"},
        "case": {**case, "unit_bytes": UNIT},
        "graphs": {
            name: [described(graph, assembled=name == DEFAULT) for graph in lowered_layer(backend)]
            for name, backend in backends.items()
            if name in names
        },
    }


if __name__ == "__main__":
    print_json(lambda: report(sys.argv[1:] or (PLAIN, *RECIPES)))
