"""Script, under ``TRITON_INTERPRET=1``: a small layer with delayed scales and cached weights, interpreted, against the same
graph node by node; with ``--merged`` its dgrads merged; ``bert`` or another of SMALL in place of ``llama``. Prints JSON.

Gradients that are summed into a bias are taken in blocks of rows, as those of large layers are."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from fp8compile.compiler.backend import fp8compile
from fp8compile.linears import history, row_blocks
from fp8compile.linears import reasons as linear_reasons
from fp8compile.recipe.recipe import Recipe

from . import fake_h100, flash_on_cpu, interpreter
from .known_scales import known_from_the_start
from .lowering import Lowered, lower_backend, lowering_config
from .measures import print_json
from .on_cuda import JOINT_PASS, to_cuda
from .run_layers_interpreted import AS_IF_LARGE, ROWS, SMALL, differences, small
from .run_model import fp8compile_backend

DELAYED = Recipe(
    linears={
        "mode": "tensorwise",
        "scaling": "delayed",
        "cache_weights": True,
        "merge_dgrads": "--merged" in sys.argv,
    },
    saved="off",
)
KIND = next((kind for kind in SMALL if kind in sys.argv), "llama")


def interpreted() -> dict[str, Any]:
    """The differences of results and gradients, and of the statistics that the backward returned; how these were taken."""
    fake_h100.install()
    interpreter.install()
    flash_on_cpu.install()
    torch.set_num_threads(1)
    mock.patch.multiple(row_blocks, LEAST_NUMEL=0, LEAST_COLUMNS=0, BLOCKS=(ROWS,)).start()
    module, args = small(KIND)
    backend, inner = fp8compile_backend(DELAYED), lower_backend(Lowered(), execute=True)
    ours = torch.compile(module, backend=lambda gm, inputs: backend(gm, inputs, inner), fullgraph=True)
    with lowering_config({JOINT_PASS: to_cuda, **AS_IF_LARGE}):
        got = step(module, ours, args)
    statistics = [operand.statistics for operand in history.alive()[-1].operands]
    torch._dynamo.reset()
    module, args = small(KIND)
    recipe = DELAYED.changed({"debug.codegen": "eager"})
    with mock.patch.object(linear_reasons, "fp8_unsupported_reason", lambda device: None):
        expected = step(module, torch.compile(module, backend=fp8compile, options={"recipe": recipe}), args)
    return {"differences": differences(got, expected), "statistics": statistics}


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
    print_json(interpreted)
