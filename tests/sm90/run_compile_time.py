"""Script: what it takes to compile a deep Llama for an H100, by pipeline and number of layers. Prints JSON.

Two figures, in CPU seconds: from the model to the text of kernels and wrapper, forward and backward, and from there to
cubins, all that the tuner would time of each kernel. Each combination is a process of its own without caches, the pipelines
alternate, and the least of the runs counts: a busy machine only ever adds.

``python -m tests.sm90.run_compile_time 2 8 32 > benchmarks/results/compile-sm90-lowered.json``; a depth alone and a pipeline,
``2 inductor``, are one combination.
"""

from __future__ import annotations

import resource
import sys
from typing import Any

import torch

from tests.support.budgets import Llama

from . import fake_h100
from .assembling import assemble
from .layers import BOTH, PLAIN, STORAGE
from .lowering import LoweredGraph, lower
from .measures import print_json
from .on_cuda import JOINT_PASS, to_cuda
from .run_layers import backend_of
from .run_linears import LABEL
from .subprocesses import result_of

HIDDEN, FFN, SEQUENCES = 512, 1376, 16  # of 64 tokens
PIPELINES = (PLAIN, STORAGE, BOTH)
RUNS = 2


def spent() -> float:
    """CPU seconds of this process and of those it started and waited for."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def graphs_of(pipeline: str, layers: int) -> list[LoweredGraph]:
    model = Llama(layers, HIDDEN, FFN).bfloat16()
    x = torch.empty(SEQUENCES, 64, HIDDEN, dtype=torch.bfloat16)
    backend = backend_of(pipeline)
    return lower(model, x, backward=True, backend=backend, config_patches={JOINT_PASS: to_cuda}).graphs


def compiled(pipeline: str, layers: int) -> dict[str, float]:
    """CPU seconds of both parts, the kernels, and the configurations that they are compiled in."""
    fake_h100.install()
    graphs_of(pipeline, 1)  # what is imported and set up once
    start = spent()
    graphs = graphs_of(pipeline, layers)
    lowered = spent()
    kernels = {k.source.replace(k.name, ""): k for graph in graphs for k in graph.kernels.values()}
    cubins = list(assemble(kernels.values()))
    return {
        "to_text": lowered - start, "to_cubins": spent() - lowered, "kernels": len(kernels), "configurations": len(cubins),
    }  # fmt: skip


def report(depths: list[int]) -> dict[str, Any]:
    """``{"layers": {depth: {pipeline: [one run, ...]}}}``, and what was compiled by what."""
    found: dict[str, dict[str, list[Any]]] = {str(depth): {p: [] for p in PIPELINES} for depth in depths}
    for number in range(RUNS):
        for depth in map(str, depths):
            for pipeline in PIPELINES:
                found[depth][pipeline].append(result_of("run_compile_time", depth, pipeline, str(number)))
                print(depth, pipeline, found[depth][pipeline][-1], file=sys.stderr, flush=True)
    versions = {**fake_h100.installed(), "target": "sm_90 (mocked)"}
    return {"label": LABEL, "versions": versions, "layers": found}


if __name__ == "__main__":
    depth, *others = sys.argv[1:]
    is_one = bool(others) and others[0] in PIPELINES
    print_json(lambda: compiled(others[0], int(depth)) if is_one else report([int(depth), *map(int, others)]))
