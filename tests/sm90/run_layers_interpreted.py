"""Script, under ``TRITON_INTERPRET=1``: whole small layers, generated and interpreted, against eager. Prints JSON.

Eager is the same rewritten graph run node by node (``debug.codegen="eager"``; for plain Inductor the module itself),
in FP32, so that only the order of sums and the contraction of roundings differ: whatever is wrong shows. Then the same
with bugs put into the generated kernels, one at a time (bugs.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from fp8compile.compiler.backend import fp8compile
from fp8compile.linears import reasons as linear_reasons
from fp8compile.passes import sum_bias_gradients
from fp8compile.recipe.recipe import Recipe

from . import fake_h100, flash_on_cpu, interpreter
from .bugs import BUGS
from .layers import BOTH, CONSERVATIVE, LINEARS, PLAIN, RECIPES, STORAGE, Layer
from .lowering import Lowered, Rewrite, lower_backend, lowering_config, stock_backend
from .measures import print_json
from .on_cuda import JOINT_PASS, to_cuda
from .run_model import fp8compile_backend

SMALL: Mapping[str, Layer] = {
    "llama": Layer("llama", 2, 8, 64, 112, 2),
    "bert": Layer("bert", 2, 8, 64, 128, 2),
    "vit": Layer("vit", 2, 8, 64, 128, 2),
    "short vit": Layer("vit", 4, 4, 64, 128, 2),  # two samples are a block of ROWS rows
}
CASES = [("llama", STORAGE)]  # CI's
MORE_CASES = [("llama", BOTH), ("bert", STORAGE), ("vit", STORAGE)]  # --more: the slow tests'; --all: every pipeline
ALL_CASES = [
    (kind, pipeline)
    for kind in ("llama", "bert", "vit")
    for pipeline in (PLAIN, STORAGE, CONSERVATIVE, LINEARS, BOTH)
]
MUTATED = ("llama", STORAGE)
# What Inductor and sum_bias_gradients do to large tensors alone is done to these too.
AS_IF_LARGE = {"triton.mix_order_reduction_non_strict_mode": True}

ROWS = 8  # of a block in which bias gradients are summed: Inductor writes shorter sums out

Tensors = dict[str, Tensor]


class Interpreted:
    """A layer as generated for sm_90, run through the interpreter, forward and backward, as often as asked."""

    def __init__(self, kind: str, pipeline: str) -> None:
        self.lowered = Lowered()
        self.module, self.args = small(kind)
        backend, inner = small_backend(pipeline), lower_backend(self.lowered, execute=True)
        torch._dynamo.reset()
        self.fn = torch.compile(self.module, backend=lambda gm, inputs: backend(gm, inputs, inner), fullgraph=True)

    def results(self, rewrite: Rewrite | None = None, *, nan: bool = False) -> Tensors:
        self.lowered.rewrite = rewrite
        with lowering_config({JOINT_PASS: to_cuda, **AS_IF_LARGE}):
            return gradients(self.module, self.fn, self.args, nan=nan)


def small(kind: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(5)
    return SMALL[kind].build(), SMALL[kind].arguments()


def small_recipe(pipeline: str) -> Recipe:
    return RECIPES[pipeline].changed({"saved.min_numel": 0})


def small_backend(pipeline: str) -> Any:
    return stock_backend if pipeline == PLAIN else fp8compile_backend(small_recipe(pipeline))


def gradients(module: nn.Module, fn: Callable[..., Tensor], args: tuple[Tensor, ...], *, nan: bool) -> Tensors:
    """The output, and the gradient of everything by a fixed random projection of it."""
    first = args[0].detach().clone().requires_grad_()
    if nan:
        first.data[1, 3, 5] = torch.nan
    out = fn(first, *args[1:])
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    wanted = {"x": first} | dict(module.named_parameters())
    found = torch.autograd.grad((out * weight).sum(), list(wanted.values()))
    return {"out": out.detach()} | dict(zip(wanted, found, strict=True))


def eager(kind: str, pipeline: str, *, nan: bool = False) -> Tensors:
    module, args = small(kind)
    if pipeline == PLAIN:
        return gradients(module, module, args, nan=nan)
    torch._dynamo.reset()
    options = {"recipe": small_recipe(pipeline).changed({"debug.codegen": "eager"})}
    # The CPU multiplies codes too, slowly.
    with mock.patch.object(linear_reasons, "fp8_unsupported_reason", lambda device: None):
        return gradients(module, torch.compile(module, backend=fp8compile, options=options), args, nan=nan)


def difference(ours: Tensors, expected: Tensors) -> float:
    """The worst of all tensors: |ours - expected| / |expected|, by Frobenius; infinite where NaN stands elsewhere.

    Softmax does not see a bias of the keys, which adds the same to all scores of a query: that gradient is 0 but for
    rounding, and is compared with the queries'.
    """
    return max(differences(ours, expected).values())


def differences(ours: Tensors, expected: Tensors) -> dict[str, float]:
    """``difference`` of each tensor."""
    sizes = expected | ({"k.bias": expected["q.bias"]} if "k.bias" in expected else {})
    return {name: _relative(ours[name], expected[name], sizes[name]) for name in expected}


def _relative(a: Tensor, b: Tensor, size: Tensor) -> float:
    if not torch.equal(a.isnan(), b.isnan()):
        return float("inf")
    a, b, size = (t.nan_to_num().double() for t in (a, b, size))
    return float((a - b).norm() / size.norm().clamp_min(1e-30))


def report(cases: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """``{"differences": {case: number}, "bugs": {bug: number}}``; a NaN in the input is a case too."""
    fake_h100.install()
    interpreter.install()
    flash_on_cpu.install()
    torch.set_num_threads(1)
    mock.patch.multiple(sum_bias_gradients, LEAST_NUMEL=0, BLOCKS=(ROWS,)).start()
    found, bugs = {}, {}
    for kind, pipeline in cases:
        layer, expected = Interpreted(kind, pipeline), eager(kind, pipeline)
        found[f"{kind}, {pipeline}"] = difference(layer.results(), expected)
        if (kind, pipeline) == MUTATED:
            with_nan = eager(kind, pipeline, nan=True)
            found[f"{kind}, {pipeline}, NaN"] = difference(layer.results(nan=True), with_nan)
            for name, bug in BUGS.items():
                bugs[name] = difference(layer.results(bug.rewrite(), nan=bug.nan), with_nan if bug.nan else expected)
                assert bug.sites, f"{name}: no kernel {bug.kernel!r} has {bug.before!r}; break something else"
    return {"differences": found, "bugs": bugs}


if __name__ == "__main__":
    print_json(lambda: report(ALL_CASES if "--all" in sys.argv else MORE_CASES if "--more" in sys.argv else CASES))
