"""Script: lower whole layers, attention included, by plain Inductor and by ours. Prints JSON.

``python -m tests.sm90.run_layers --all > benchmarks/results/layers-sm90-lowered.json`` writes down every layer of
layers.py in every pipeline, ours assembled where they hold all kinds of kernels, and the optimizer's step; without
``--all``, CI's part; with ``--slow``, what is tested beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from . import fake_h100, run_optimizer
from .assembling import assemble
from .externs import ExternCall, bytes_and_calls
from .known_scales import known_from_the_start
from .layers import (
    BOTH,
    BOTH_CACHED,
    BOTH_MERGED,
    CACHED,
    CASES,
    CONSERVATIVE,
    DELAYED,
    LINEARS,
    LINEARS_CACHED,
    MERGED,
    PLAIN,
    RECIPES,
    ROWS,
    STORAGE,
    Layer,
)
from .least import least_bytes
from .lowering import Backend, LoweredGraph, lower, stock_backend
from .measures import print_json
from .on_cuda import JOINT_PASS, to_cuda
from .optimizers import chunks_of, lowered_chunk
from .run_linears import LABEL, product
from .run_model import fp8compile_backend
from .scattered import scattered_stores

PIPELINES = (PLAIN, STORAGE, CONSERVATIVE, CACHED, BOTH_CACHED, DELAYED, LINEARS, LINEARS_CACHED, BOTH)
ALL = {
    case: (*PIPELINES, MERGED, BOTH_MERGED, *([ROWS] if layer.hidden == RECIPES[ROWS].saved.group_size else []))
    for case, layer in CASES.items()
}
# CI: what is lowered, and what of it is assembled too. SLOW: what ``make sweep`` tests beside it.
LOWERED = {"llama 16k": (PLAIN, CONSERVATIVE, MERGED)}
SLOW = {
    "llama 16k": (STORAGE, CACHED, BOTH_CACHED, LINEARS, LINEARS_CACHED, DELAYED),
    "bert 16k": (PLAIN, CONSERVATIVE, MERGED, ROWS, STORAGE, BOTH, CACHED),
    "vit 16k": (PLAIN, CONSERVATIVE, MERGED, STORAGE, CACHED),
}
ASSEMBLED = (*(("llama 16k", each) for each in (STORAGE, CACHED, BOTH_CACHED, MERGED)), ("bert 16k", MERGED))


def backend_of(pipeline: str) -> Backend:
    if pipeline == PLAIN:
        return stock_backend
    return fp8compile_backend(RECIPES[pipeline])


def lowered_layer(
    layer: Layer, backend: Backend, converted: Callable[[nn.Module], nn.Module] = lambda module: module
) -> list[LoweredGraph]:
    """Forward and backward, the joint graph on fake cuda tensors; ``converted`` may swap modules."""
    module, args = layer.empty()
    with known_from_the_start():
        found = lower(converted(module), *args, backward=True, backend=backend, config_patches={JOINT_PASS: to_cuda})
    return found.graphs


def described(graph: LoweredGraph, *, assembled: bool) -> dict[str, Any]:
    """Launches with their bytes, workspaces and extern calls with theirs, the least bytes, codes that are stored byte by
    byte, and what the assembler said."""
    assert graph.graph is not None
    num_bytes, calls = bytes_and_calls(graph)
    return {
        "num_bytes": num_bytes,
        "workspace_bytes": graph.workspace_bytes,
        "least_bytes": least_bytes(graph.graph),
        "launches": [[name, graph.kernels[name].num_bytes] for name in graph.launches],
        "externs": [[call.name, call.num_bytes, work(call)] for call in calls],
        "products": [product(call) for call in calls if call.name == "_scaled_mm"],
        "scattered": {name: found for name in graph.kernels if (found := scattered_stores(graph.kernels[name]))},
        "assembled": usage(graph) if assembled else {},
    }


def work(call: ExternCall) -> int:
    """Multiply-adds times 2 of a product, or of attention without regard to a causal mask."""
    if "attention" not in call.name:
        *_, a, b = (
            (o for o in call.operands[:3] if o and len(o.shape) == 2) if call.name == "addmm" else call.operands[:2]
        )
        return 2 * a.shape[0] * a.shape[1] * b.shape[1]
    backward = "backward" in call.name
    query, key = call.operands[backward : backward + 2]
    assert query and key
    batch, heads, seq, size = query.shape
    return (10 if backward else 4) * batch * heads * seq * key.shape[2] * size


def usage(graph: LoweredGraph) -> dict[str, Any]:
    """By kernel, for each configuration: registers, spilled bytes, whether the tuner would time it."""
    found: dict[str, Any] = {}
    for cubin in assemble(graph.kernels.values()):
        entry = [cubin.registers, cubin.spill_bytes, cubin.timed]
        found.setdefault(cubin.kernel, []).append(entry)
    return found


def optimizer_step(*, assembled: bool) -> dict[str, Any]:
    """AdamW, FP32 and BF16 with split weights: one kernel for each shape, beside the least."""
    found = {}
    for name in ("FP32", "BF16, split"):
        chunks, least = chunks_of(run_optimizer.CASES[name].build())
        graphs = [lowered_chunk(chunk)[0] for chunk in chunks]
        launches = [[k, graph.kernels[k].num_bytes] for graph in graphs for k in graph.launches]
        cubins = {k: v for graph in graphs for k, v in usage(graph).items()} if assembled else {}
        found[name] = {"least_bytes": least, "launches": launches, "assembled": cubins}
    return found


def report(cases: Mapping[str, tuple[str, ...]], *, whole: bool) -> dict[str, Any]:
    """``{"layers": {case: {pipeline: [forward, backward]}}, "optimizer": ...}``, and what was lowered by what."""
    fake_h100.install()
    layers: dict[str, Any] = {}
    for case, pipelines in cases.items():
        layers[case] = {"unit_bytes": CASES[case].unit, "pipelines": {}}
        for pipeline in pipelines:
            graphs = lowered_layer(CASES[case], backend_of(pipeline))
            assembled = (whole and pipeline in (STORAGE, ROWS, BOTH, CACHED)) or (case, pipeline) in ASSEMBLED
            layers[case]["pipelines"][pipeline] = [described(graph, assembled=assembled) for graph in graphs]
            print(case, pipeline, sum(graph.num_bytes for graph in graphs) / CASES[case].unit, flush=True)
    return {
        "label": LABEL,
        "versions": {**fake_h100.installed(), "target": "sm_90 (mocked)"},
        "layers": layers,
        "optimizer": optimizer_step(assembled=whole) if whole else {},
    }


if __name__ == "__main__":
    whole = "--all" in sys.argv
    print_json(lambda: report(ALL if whole else SLOW if "--slow" in sys.argv else LOWERED, whole=whole))
