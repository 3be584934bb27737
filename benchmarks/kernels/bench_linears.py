"""A linear's forward and backward (dgrad and wgrad with all casts), and its three products alone on codes that are there.

forward   2 M K N operations      dgrad, wgrad   2 M K N each
bytes     operands read and result written: 2 an element, in the FP8 products alone 1 for operands
ceiling   the square product measured in the same run: BF16's for BF16 arms, FP8's for FP8 arms

python benchmarks/kernels/bench_linears.py [--device cpu] [--tiny] [--json results.json]
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a script's own folder is all that is there

from benchmarks.harness import peers
from benchmarks.harness.kernel_rows import counted, kernel_row
from benchmarks.harness.run_alone import run_alone
from benchmarks.harness.timing import Arm, Lap
from benchmarks.registry import Arms, Benchmark, Case, Row, Setting

SHAPES = {
    **{f"square {n}": (n, n, n) for n in (1024, 2048, 4096, 8192)},
    "llama2-7b qkvo 8x2048": (16384, 4096, 4096),
    "llama2-7b up 8x2048": (16384, 4096, 11008),
    "llama2-7b down 8x2048": (16384, 11008, 4096),
    "llama3-8b up 1x8192": (8192, 4096, 14336),
    "llama3-8b kv 1x8192": (8192, 4096, 1024),
    "vit-l fc1 64x197": (12608, 1024, 4096),
    "vit-l fc2 64x197": (12608, 4096, 1024),
}
TYPICAL = "llama2-7b up 8x2048"
FP8_ARMS = ("ours", "torchao float8", "fp8 products")


def _linear(function: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor, dy: Tensor) -> Arm:
    leaves = [x.detach().clone().requires_grad_(), *module.parameters()]

    def arm(lap: Lap) -> None:
        y = function(leaves[0])
        lap("forward")
        torch.autograd.grad(y, leaves, dy)
        lap("backward")

    return arm


def _products(multiply: Callable[[Tensor, Tensor], Tensor], x: Tensor, w: Tensor, dy: Tensor) -> Arm:
    """The three products, operands laid out beforehand: the left row-major, the right column-major."""
    pairs = {"forward": (x, w), "dgrad": (dy, w.t().contiguous()), "wgrad": (dy.t().contiguous(), x.t().contiguous())}

    def arm(lap: Lap) -> None:
        for name, (left, right) in pairs.items():
            multiply(left, right.t())
            lap(name)

    return arm


def _scaled(device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    one = torch.ones((), device=device)

    def multiply(left: Tensor, right: Tensor) -> Tensor:
        return torch._scaled_mm(left, right, one, one, out_dtype=torch.bfloat16)

    return multiply


def _codes(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn)


def arms(case: Case, setting: Setting) -> Arms:
    """Whole linears: ours, Inductor, eager, torchao; products alone: BF16 and FP8."""
    m, k, n = (case.shape[name] for name in "MKN")
    made: dict[str, Any] = {"device": setting.device, "dtype": torch.bfloat16}
    x, dy = torch.randn(m, k, **made), torch.randn(m, n, **made)
    linear = nn.Linear(k, n, bias=False, **made)
    w = linear.weight.detach()

    def whole(compiled: Callable[[nn.Module], Callable[..., Tensor]]) -> Arm:
        module = nn.Sequential(copy.deepcopy(linear))
        return _linear(compiled(module), module, x, dy)

    calls, left_out = peers.built(
        {
            "ours": lambda: whole(
                lambda module: peers.ours(module, setting.device, linears="tensorwise", saved="off")
            ),
            "inductor": lambda: whole(peers.inductor),
            "eager": lambda: whole(lambda module: module),
            "torchao float8": lambda: whole(peers.torchao_float8),
            "bf16 products": lambda: _products(torch.mm, x, w, dy),
            "fp8 products": lambda: _products(_scaled(setting.device), _codes(x), _codes(w), _codes(dy)),
        },
        setting.device,
    )
    return Arms(calls, left_out, _work(m, k, n, calls))


def measure(case: Case, setting: Setting) -> Row:
    """Linears and products, timed."""
    return kernel_row(arms(case, setting), setting)


def _work(m: int, k: int, n: int, arms: dict[str, Arm]) -> dict[str, Any]:
    flops, sizes = 2.0 * m * k * n, {"forward": m * n, "dgrad": m * k, "wgrad": k * n}
    everything = sum(sizes.values())
    found = {}
    for arm in arms:
        operand, unit = (1 if arm == "fp8 products" else 2), ("fp8" if arm in FP8_ARMS else "bf16")
        for lap, result in sizes.items():
            found[f"{arm}/{lap}"] = counted(operand * (everything - result) + 2 * result, flops, unit)
        # dy, w and x are read, dx and dw written
        found[f"{arm}/backward"] = counted(2 * (everything + sizes["dgrad"] + sizes["wgrad"]), 2 * flops, unit)
    return found


def _case(name: str, shape: tuple[int, int, int]) -> Case:
    return Case(name, dict(zip("MKN", shape, strict=True)), name == TYPICAL)


BENCHMARKS = (
    Benchmark(
        "linear",
        "kernels",
        "forward and backward of a linear, and its three products alone",
        ("inductor", "eager", "torchao float8", "bf16 products", "fp8 products"),
        tuple(_case(*item) for item in SHAPES.items()),
        (_case("tiny", (32, 64, 48)),),
        measure,
        arms=arms,
    ),
)

if __name__ == "__main__":
    run_alone(BENCHMARKS, __doc__)
