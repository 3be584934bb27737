"""Script, under ``TRITON_INTERPRET=1``: a gated MLP whose gate and up are one matrix, storage alone, interpreted, against the
same graph node by node. Prints JSON: the differences, and the stores of each kernel of the gradient of the split."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8compile.compiler.backend import fp8compile
from fp8compile.recipe.recipe import Recipe

from . import fake_h100, interpreter
from .lowering import Lowered, lower_backend, lowering_config
from .measures import print_json
from .on_cuda import JOINT_PASS, to_cuda
from .run_layers_interpreted import differences, gradients
from .run_model import fp8compile_backend

ROWS, HIDDEN, INNER = 32, 64, 128
RECIPE = Recipe(linears="off", saved={"min_numel": 0})


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(HIDDEN, 2 * INNER, bias=False), nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)  # type: ignore[no-any-return]


def results(run: Callable[[nn.Module], Callable[..., Any]]) -> dict[str, Tensor]:
    """The output and all gradients of the same module and input."""
    torch.manual_seed(0)
    module, x = Gated(), torch.randn(ROWS, HIDDEN)
    return gradients(module, run(module), (x,), nan=False)


def report() -> dict[str, Any]:
    fake_h100.install()
    interpreter.install()
    torch.set_num_threads(1)
    lowered = Lowered()
    backend, inner = fp8compile_backend(RECIPE), lower_backend(lowered, execute=True)
    with lowering_config({JOINT_PASS: to_cuda}):
        got = results(lambda m: torch.compile(m, backend=lambda gm, xs: backend(gm, xs, inner), fullgraph=True))
    torch._dynamo.reset()
    plain = {"recipe": RECIPE.changed({"debug.codegen": "eager"})}
    expected = results(lambda m: torch.compile(m, backend=fp8compile, options=plain))
    sources = [kernel.source for kernel in lowered.graphs[-1].kernels.values()]
    stores = [len(re.findall(r"tl\.store\(out_ptr", source)) for source in sources if "silu_backward" in source]
    return {"differences": differences(got, expected), "stores": stores}


if __name__ == "__main__":
    print_json(report)
