"""Operands of FP8 products: codes in both layouts (forward and wgrad contract different dimensions), and the amax alone.

    cast, scale known   reads x once, writes codes and transposed codes          4 bytes an element
    cast, scale taken   must read x twice: for the amax, then for the codes      6
    amax                reads x                                                  2

Shapes: COAT's own, and the activations of 16,384 tokens.

    python benchmarks/kernels/bench_casts.py [--device cpu] [--tiny] [--json results.json]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a script's own folder is all that is there

from benchmarks.harness.kernel_rows import counted, kernel_row
from benchmarks.harness.run_alone import run_alone
from benchmarks.harness.timing import Arm, Lap
from benchmarks.registry import Arms, Benchmark, Case, Row, Setting
from fp8compile.numerics import E4M3
from fp8compile.numerics.codecs import Tensorwise
from fp8compile.numerics.scaling import amax_tensorwise, quantize

SHAPES = ((16384, 4096), (11008, 16384), (11008, 8192), (4096, 16384), (4096, 8192))


def taken(x: Tensor, inv_scale: Tensor) -> tuple[Tensor, ...]:
    """Codes in both layouts, with the scale of the very tensor."""
    codes, inv_scale = Tensorwise(E4M3).encode(x)
    return codes, codes.t().contiguous(), inv_scale


def known(x: Tensor, inv_scale: Tensor) -> tuple[Tensor, ...]:
    """Codes in both layouts under a scale that is there already, and the amax for the next one."""
    codes = quantize(x, inv_scale, E4M3)
    return codes, codes.t().contiguous(), amax_tensorwise(x)


def _compiled(function: Callable[..., object]) -> Callable[..., object]:
    return torch.compile(function, dynamic=False)


def _apart() -> Callable[..., object]:
    """The cast and the transposition as kernels of their own."""
    cast = _compiled(lambda x, inv_scale: quantize(x, inv_scale, E4M3))
    turn = _compiled(lambda codes: codes.view(torch.uint8).t().contiguous())
    return lambda x, inv_scale: turn(cast(x, inv_scale))


def _arm(function: Callable[..., object], name: str, *args: Tensor) -> Arm:
    def arm(lap: Lap) -> None:
        function(*args)
        lap(name)

    return arm


def _x(case: Case, setting: Setting) -> Tensor:
    return torch.randn(case.shape["rows"], case.shape["columns"], device=setting.device, dtype=torch.bfloat16)


def casts(case: Case, setting: Setting) -> Arms:
    """Ours with a known and with a taken scale; cast and transposition apart; uncompiled."""
    x = _x(case, setting)
    inv_scale = torch.full((), 4.0 / E4M3.max, device=setting.device)
    functions = {
        "ours, scale known": _compiled(known),
        "ours, scale taken": _compiled(taken),
        "inductor, two kernels": _apart(),
        "eager": taken,
    }
    calls = {name: _arm(function, "cast", x, inv_scale) for name, function in functions.items()}
    work = {"cast": counted(4 * x.numel())}
    work |= {f"{arm}/cast": counted(6 * x.numel()) for arm in ("ours, scale taken", "eager")}
    return Arms(calls, work=work)


def measure_casts(case: Case, setting: Setting) -> Row:
    """Casts, timed."""
    return kernel_row(casts(case, setting), setting)


def amaxes(case: Case, setting: Setting) -> Arms:
    """Ours in two reductions; one reduction, compiled and not."""
    x = _x(case, setting)
    functions = {
        "ours": _compiled(amax_tensorwise),
        "inductor, one reduction": _compiled(lambda x: x.abs().amax()),
        "eager": lambda x: x.abs().amax(),
    }
    calls = {name: _arm(function, "amax", x) for name, function in functions.items()}
    return Arms(calls, work={"amax": counted(2 * x.numel())})


def measure_amax(case: Case, setting: Setting) -> Row:
    """Largest magnitudes, timed."""
    return kernel_row(amaxes(case, setting), setting)


def _case(rows: int, columns: int) -> Case:
    return Case(f"{rows}x{columns}", {"rows": rows, "columns": columns}, (rows, columns) == SHAPES[0])


CASES, TINY = tuple(_case(*shape) for shape in SHAPES), (_case(32, 64),)
BENCHMARKS = (
    Benchmark(
        "cast_transpose",
        "kernels",
        "a BF16 tensor as E4M3 codes and transposed codes",
        ("inductor, two kernels", "eager"),
        CASES,
        TINY,
        measure_casts,
        arms=casts,
    ),
    Benchmark(
        "amax",
        "kernels",
        "the largest magnitude of a BF16 tensor",
        ("inductor, one reduction", "eager"),
        CASES,
        TINY,
        measure_amax,
        arms=amaxes,
    ),
)

if __name__ == "__main__":
    run_alone(BENCHMARKS, __doc__)
