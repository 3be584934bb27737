"""SiLU * up, GELU and norms, forward and backward: ours writes what the backward needs as codes and decodes it there.

    forward    reads the inputs, writes the result                        2 bytes an element each
               ours: writes codes of what is kept as well                 1 byte, and a scale per 128
    backward   reads the result's gradient and what is kept (2 bytes, ours 1), writes the inputs' gradients

The weight of a norm and its gradient, a row each, are not counted.

    python benchmarks/kernels/bench_pointwise.py [--device cpu] [--tiny] [--json results.json]
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a script's own folder is all that is there

from benchmarks.harness import peers
from benchmarks.harness.kernel_rows import counted, kernel_row
from benchmarks.harness.run_alone import run_alone
from benchmarks.harness.timing import Arm, Lap
from benchmarks.registry import Arms, Benchmark, Case, Row, Setting
from fp8compile.numerics import INT8
from fp8compile.numerics.codecs import Groupwise

CODEC = Groupwise(INT8)
EPS = 1e-6


@dataclass(frozen=True)
class Operation:
    """A function of ``inputs`` activations, which its backward needs again, and ``weights`` vectors."""

    function: Callable[..., Tensor]
    inputs: int
    weights: int = 0


OPERATIONS = {
    "silu_mul": Operation(lambda gate, up: F.silu(gate) * up, 2),
    "gelu": Operation(lambda x: F.gelu(x, approximate="tanh"), 1),
    "rms_norm": Operation(lambda x, w: F.rms_norm(x, w.shape, w, EPS), 1, 1),
    "layer_norm": Operation(lambda x, w, b: F.layer_norm(x, w.shape, w, b, EPS), 1, 2),
}


def gradients(function: Callable[..., Tensor], dy: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """The inputs' gradients, by autograd's formulas, traceable by torch.compile."""
    return torch.func.vjp(function, *inputs)[1](dy)


def _ours(op: Operation, dy: Tensor, *inputs: Tensor) -> Arm:
    def forward(*inputs: Tensor) -> tuple[Tensor, ...]:
        return op.function(*inputs), *(part for x in inputs[: op.inputs] for part in CODEC.encode(x))

    def backward(dy: Tensor, weights: tuple[Tensor, ...], *stored: Tensor) -> tuple[Tensor, ...]:
        kept = (CODEC.decode(codes, inv, dy.dtype) for codes, inv in zip(stored[::2], stored[1::2], strict=True))
        return gradients(op.function, dy, *kept, *weights)

    forward_fn, backward_fn = (torch.compile(each, dynamic=False) for each in (forward, backward))
    weights = inputs[op.inputs :]

    def arm(lap: Lap) -> None:
        _, *stored = forward_fn(*inputs)
        lap("forward")
        backward_fn(dy, weights, *stored)
        lap("backward")

    return arm


def _inductor(op: Operation, dy: Tensor, *inputs: Tensor) -> Arm:
    forward_fn = torch.compile(op.function, dynamic=False)
    backward_fn = torch.compile(functools.partial(gradients, op.function), dynamic=False)

    def arm(lap: Lap) -> None:
        forward_fn(*inputs)
        lap("forward")
        backward_fn(dy, *inputs)
        lap("backward")

    return arm


def _autograd(function: Callable[..., Tensor], dy: Tensor, *inputs: Tensor) -> Arm:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]

    def arm(lap: Lap) -> None:
        y = function(*leaves)
        lap("forward")
        torch.autograd.grad(y, leaves, dy)
        lap("backward")

    return arm


def _liger(name: str) -> Callable[..., Tensor]:
    if name == "silu_mul":
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction as function
    elif name == "rms_norm":
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        return lambda x, w: LigerRMSNormFunction.apply(x, w, EPS, 0.0, "llama", False)
    else:
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction

        return lambda x, w, b: LigerLayerNormFunction.apply(x, w, b, EPS)
    return function.apply  # type: ignore[no-any-return]


def arms(case: Case, setting: Setting) -> Arms:
    """Ours, plain Inductor, eager, Liger."""
    name, shape = case.shape["op"], (case.shape["rows"], case.shape["columns"])
    op = OPERATIONS[name]
    made: dict[str, Any] = {"device": setting.device, "dtype": torch.bfloat16}
    dy, *inputs = (torch.randn(shape, **made) for _ in range(1 + op.inputs))
    inputs += [torch.randn(shape[1:], **made) for _ in range(op.weights)]
    calls: dict[str, Arm] = {
        "ours": _ours(op, dy, *inputs),
        "inductor": _inductor(op, dy, *inputs),
        "eager": _autograd(op.function, dy, *inputs),
    }
    left_out = {"liger": "has no GELU of one input"} if name == "gelu" else {}
    if not left_out:
        liger, left_out = peers.built({"liger": lambda: _autograd(_liger(name), dy, *inputs)}, setting.device)
        calls |= liger
    return Arms(calls, left_out, _work(op, dy.numel()))


def measure(case: Case, setting: Setting) -> Row:
    """Forward and backward, timed."""
    return kernel_row(arms(case, setting), setting)


def _work(op: Operation, numel: int) -> dict[str, Any]:
    plain, codes = 2 * numel, numel + numel // 128 * 2
    return {
        "forward": counted(plain * (op.inputs + 1)),
        "backward": counted(plain * (2 * op.inputs + 1)),
        "ours/forward": counted(plain * (op.inputs + 1) + codes * op.inputs),
        "ours/backward": counted(plain * (op.inputs + 1) + codes * op.inputs),
    }


def _cases(name: str, *shapes: tuple[int, int]) -> tuple[Case, ...]:
    typical = max(shapes)
    return tuple(
        Case(f"{rows}x{n}", {"op": name, "rows": rows, "columns": n}, (rows, n) == typical) for rows, n in shapes
    )


def _benchmark(name: str, about: str, *shapes: tuple[int, int]) -> Benchmark:
    against = ("inductor", "eager", "liger")
    cases, tiny = _cases(name, *shapes), _cases(name, (16, 256))
    return Benchmark(name, "kernels", about, against, cases, tiny, measure, limit=90, arms=arms)


COAT = (1024, 2048)  # COAT's 4 x 256 x 2048
BENCHMARKS = (
    _benchmark("silu_mul", "SiLU(gate) * up; gate and up kept", COAT, (16384, 11008), (8192, 14336)),
    _benchmark("gelu", "GELU; its input kept", COAT, (16384, 16384)),
    _benchmark("rms_norm", "RMSNorm; its input kept", COAT, (16384, 4096)),
    _benchmark("layer_norm", "LayerNorm; its input kept", COAT, (16384, 4096)),
)

if __name__ == "__main__":
    run_alone(BENCHMARKS, __doc__)
