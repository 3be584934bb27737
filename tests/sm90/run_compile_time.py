"""Script: what it takes to compile deep models for an H100, by pipeline and number of layers. Prints JSON.

Two figures, in CPU seconds: from the model to the text of kernels and wrapper, forward and backward, and from there to
cubins, all that the tuner would time of each kernel. What stands for a GPU, and what looks at cubins, is not counted. Each
combination is a process of its own without caches.

``python -m tests.sm90.run_compile_time > benchmarks/results/compile-sm90-lowered.json``; a model, a depth and a pipeline,
``llama 2 inductor``, are one combination.
"""

from __future__ import annotations

import functools
import os
import resource
import sys
import tempfile
import unittest.mock
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.support.budgets import Llama

from . import fake_h100, lowering
from .assembling import compile_all
from .known_scales import known_from_the_start
from .layers import BOTH, BOTH_CACHED, PLAIN, STORAGE, ViTBlock
from .lowering import LoweredGraph, lower
from .measures import print_json
from .on_cuda import JOINT_PASS, to_cuda
from .run_layers import backend_of
from .run_linears import LABEL
from .subprocesses import result_of

HIDDEN, FFN, HEADS = 512, 1376, 4
TOKENS = (16, 64, HIDDEN)
PIXELS = (8, 3, 224, 224)
RESNET_50 = 50  # convolutions on the way through it
SHOWN = (PLAIN, STORAGE, BOTH)
DEPTHS = {
    "llama": {1: (*SHOWN, BOTH_CACHED), 6: (*SHOWN, BOTH_CACHED), 32: SHOWN},
    "vit": {12: SHOWN},
    "resnet": {RESNET_50: (PLAIN, STORAGE)},  # of its linears only the head
}


def llama(layers: int) -> nn.Module:
    return Llama(layers, HIDDEN, FFN)


def vit(layers: int) -> nn.Module:
    return nn.Sequential(*(ViTBlock(HIDDEN, 4 * HIDDEN, HEADS) for _ in range(layers)))


def resnet(layers: int) -> nn.Module:
    """ResNet-50, channels last; else a block of each of its four kinds."""
    from transformers import ResNetConfig, ResNetModel

    depths = [3, 4, 6, 3] if layers == RESNET_50 else [1, 1, 1, 1]
    return ResNetModel(ResNetConfig(depths=depths)).train().to(memory_format=torch.channels_last)  # type: ignore[call-arg]


MODELS = {"llama": (llama, TOKENS), "vit": (vit, TOKENS), "resnet": (resnet, PIXELS)}


def spent() -> float:
    """CPU seconds of this process and of those it started and waited for."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class StandIn:
    """CPU seconds spent on putting graphs onto fake cuda tensors, which a machine with a GPU does not spend."""

    seconds = 0.0

    def timed(self, put: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(put)
        def inside(*args: Any, **kwargs: Any) -> Any:
            start = spent()
            try:
                return put(*args, **kwargs)
            finally:
                self.seconds += spent() - start

        return inside


def graphs_of(name: str, layers: int, pipeline: str, put: Callable[..., Any] = to_cuda) -> list[LoweredGraph]:
    make, shape = MODELS[name]
    order = torch.channels_last if len(shape) == 4 else torch.contiguous_format
    x = torch.empty(shape, dtype=torch.bfloat16).to(memory_format=order).requires_grad_()
    backend, patches = backend_of(pipeline), {JOINT_PASS: put}
    with known_from_the_start():
        return lower(make(layers).bfloat16(), x, backward=True, backend=backend, config_patches=patches).graphs


def compiled(name: str, layers: int, pipeline: str) -> dict[str, float]:
    """CPU seconds of both parts, the kernels, and the configurations that they are compiled in."""
    fake_h100.install()
    graphs_of(name, 1, pipeline)  # what is imported and set up once
    stand_in = StandIn()
    fake_h100.replace(lowering, "retarget", stand_in.timed(lowering.retarget))
    start = spent()
    graphs = graphs_of(name, layers, pipeline, stand_in.timed(to_cuda))
    to_text = spent() - start - stand_in.seconds
    kernels = {k.source.replace(k.name, ""): k for graph in graphs for k in graph.kernels.values()}
    lowered = spent()
    with tempfile.TemporaryDirectory() as cache, unittest.mock.patch.dict(os.environ, TRITON_CACHE_DIR=cache):
        configurations = sum(map(compile_all, kernels.values()))
    to_cubins = spent() - lowered
    return {"to_text": to_text, "to_cubins": to_cubins, "kernels": len(kernels), "configurations": configurations}


def report() -> dict[str, Any]:
    """``{"seconds": {model: {depth: {pipeline: [one run, ...]}}}}``, and what was compiled by what."""
    seconds: dict[str, Any] = {
        name: {str(depth): {pipeline: [] for pipeline in pipelines} for depth, pipelines in by_depth.items()}
        for name, by_depth in DEPTHS.items()
    }
    for name, by_depth in seconds.items():
        for depth, by_pipeline in by_depth.items():
            for pipeline, runs in by_pipeline.items():
                runs.append(result_of("run_compile_time", name, depth, pipeline))
                print(name, depth, pipeline, runs[-1], file=sys.stderr, flush=True)
    versions = {**fake_h100.installed(), "target": "sm_90 (mocked)"}
    return {"label": LABEL, "versions": versions, "seconds": seconds}


if __name__ == "__main__":
    one = sys.argv[1:4]
    print_json(lambda: compiled(one[0], int(one[1]), one[2]) if one else report())
