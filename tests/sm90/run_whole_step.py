"""Script: lower a whole step whose updates write the codes of the next step's weights. Prints JSON."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import fp8compile
from fp8compile.whole_step import compiling, placing

from . import fake_h100
from .assembling import assemble
from .lowering import CUDA, Lowered, LoweredGraph, lower_backend, lowering_config
from .measures import measured, print_json
from .on_cuda import JOINT_PASS, to_cuda

WIDTH, ROWS, LAYERS = 1024, 2048, 2
MOMENTS = 6  # tensors of two moments: codes, amax and exponent each
CASES = {"written": True, "not written": False}  # whether updates write codes
RECIPE = {"linears": "tensorwise", "linears.cache_weights": True}


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def model() -> nn.Module:
    layers = [(nn.Linear(WIDTH, WIDTH, bias=False), nn.GELU()) for _ in range(LAYERS)]
    return nn.Sequential(*(each for pair in layers for each in pair)).bfloat16()


def fake_on_cuda(tensor: Tensor, mode: Any) -> Tensor:
    with mode:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=CUDA)


def lowered(weight_codes: bool) -> LoweredGraph:
    """A step of two linears in BF16, with AdamW."""
    net = model()
    optimizer = fp8compile.optim.AdamW(net, lr=1e-3, weight_codes=weight_codes)
    found = Lowered()
    with (
        lowering_config({JOINT_PASS: to_cuda}),
        mock.patch.object(compiling.private, "compile_fx_inner", lower_backend(found)),
        mock.patch.object(placing, "fake_of", fake_on_cuda),
    ):
        step = fp8compile.train_step(net, loss_fn, optimizer, recipe=RECIPE, fallback=False)
        step(torch.empty(ROWS, WIDTH, dtype=torch.bfloat16))
    return found.only


def taken_by(graph: LoweredGraph) -> list[tuple[str, list[str]]]:
    """The kernels in the order of their launches, and what each is called with."""
    calls = re.findall(r"^ *(triton_\w+)\.run\((.*)\)$", graph.wrapper, re.MULTILINE)
    return [(name, arguments.split(", ")) for name, arguments in calls if name in graph.kernels]


def report(cases: Sequence[str]) -> dict[str, Any]:
    """``{case: measures}``; ``updates`` and ``behind`` are bytes an element of a weight, of the kernels that take moments and
    of all behind the last of these. Those of updates are assembled."""
    fake_h100.install()
    found: dict[str, Any] = {}
    for case in cases:
        graph = lowered(CASES[case])
        calls = taken_by(graph)
        moved = [graph.kernels[name].num_bytes / WIDTH**2 for name, _ in calls]
        moments = [at for at, (_, args) in enumerate(calls) if sum("of_optimizer" in a for a in args) >= MOMENTS]
        cubins = assemble([graph.kernels[name] for name in {calls[at][0] for at in moments}])
        found[case] = measured(graph, assembled=False) | {
            "spills": [cubin.spill_bytes for cubin in cubins if cubin.timed]
        }
        found[case] |= {"updates": [moved[at] for at in moments], "behind": moved[moments[-1] + 1 :]}
    return found


if __name__ == "__main__":
    print_json(lambda: report(sys.argv[1:] or [*CASES]))
