"""Script: layers with delayed scales lowered for sm_90, beside plain Inductor and dynamic scales. Prints JSON.

With ``interpret``, under ``TRITON_INTERPRET=1``: a small one interpreted, against the same graph node by node.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from fp8compile.compiler.backend import fp8compile
from fp8compile.passes import quantize_linears
from fp8compile.recipe.recipe import Recipe
from fp8compile.scaling import history
from fp8compile.scaling.history import Histories

from . import fake_h100, flash_on_cpu, interpreter
from .assembling import assemble
from .layers import CASES, PLAIN
from .lowering import Lowered, lower_backend, lowering_config, stock_backend
from .measures import print_json
from .on_cuda import JOINT_PASS, to_cuda
from .run_layers import lowered_layer
from .run_layers_interpreted import AS_IF_LARGE, _relative, small
from .run_model import fp8compile_backend

DELAYED = Recipe(saved="off", linear_scaling="delayed")
AMAX = 4.0  # what every operand is said to have had
SHOWN = ("llama 16k", "bert 16k")


def known_from_the_start() -> Any:
    """No step measures: every operand begins with one amax in its history."""
    remember = Histories.remember

    def make(self: Histories, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        remember(self, torch.full_like(self.amaxes, AMAX))

    init = Histories.__init__
    return mock.patch.multiple(Histories, __init__=make, must_measure=lambda self: False)


def lowered() -> dict[str, Any]:
    """By case and pipeline: ``[[launches, bytes, bytes of kernels that read parameters alone], ...]``; spills of one case."""
    fake_h100.install()
    found: dict[str, Any] = {"spills": []}
    for case in SHOWN:
        found[case] = {"unit": CASES[case].unit}
        for name, backend in ((PLAIN, stock_backend), ("delayed", fp8compile_backend(DELAYED))):
            with known_from_the_start():
                graphs = lowered_layer(CASES[case], backend)
            found[case][name] = [[len(g.launches), g.num_bytes] for g in graphs]
            if name == "delayed" and case == SHOWN[0]:
                cubins = [c for g in graphs for c in assemble(g.kernels.values())]
                found["spills"] = [[c.kernel, c.spill_bytes, c.timed] for c in cubins if c.spill_bytes]
                found["configurations"] = len(cubins)
    return found


def interpreted() -> dict[str, float]:
    """The worst difference of results and gradients, and of the statistics that the backward returned."""
    fake_h100.install()
    interpreter.install()
    flash_on_cpu.install()
    torch.set_num_threads(1)
    module, args = small("llama")
    backend, inner = fp8compile_backend(DELAYED), lower_backend(Lowered(), execute=True)
    ours = torch.compile(module, backend=lambda gm, inputs: backend(gm, inputs, inner), fullgraph=True)
    with lowering_config({JOINT_PASS: to_cuda, **AS_IF_LARGE}):
        got = step(module, ours, args)
    torch._dynamo.reset()
    module, args = small("llama")
    recipe = Recipe(saved="off", linear_scaling="delayed", codegen="eager")
    with mock.patch.object(quantize_linears, "fp8_unsupported_reason", lambda device: None):
        expected = step(module, torch.compile(module, backend=fp8compile, options={"recipe": recipe}), args)
    return {name: _relative(got[name], value, value) for name, value in expected.items()}


def step(module: nn.Module, fn: Callable[..., Tensor], args: tuple[Tensor, ...]) -> dict[str, Tensor]:
    first = args[0].detach().clone().requires_grad_()
    with known_from_the_start():
        before = len(history.alive())
        out = fn(first, *args[1:])
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
        (out * weight).sum().backward()
    each = history.alive()[before]
    labels = [operand.label for operand in each.operands]
    told = dict(zip((f"amax of {label}" for label in labels), each.amaxes[:, 0].cpu(), strict=True))
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    assert first.grad is not None and each.entries == 1
    return {"out": out.detach(), "x": first.grad, **gradients, **told}


if __name__ == "__main__":
    print_json(interpreted if "interpret" in sys.argv else lowered)
