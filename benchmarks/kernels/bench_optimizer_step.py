"""Time and memory of one optimizer step: ours in several formats beside torch's fused AdamW and, where installed, peers.

least bytes of a step   the gradient read, the parameter and the states read and written: bytes(g) + 2 (bytes(p) + states)

python benchmarks/kernels/bench_optimizer_step.py [--device cpu] [--tiny] [--json results.json]
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a script's own folder is all that is there

from benchmarks.harness import peers
from benchmarks.harness.kernel_rows import counted, kernel_row
from benchmarks.harness.memory import state_bytes
from benchmarks.harness.run_alone import run_alone
from benchmarks.harness.timing import Arm, Lap
from benchmarks.registry import Arms, Benchmark, Case, Row, Setting
from fp8compile import optim

SHAPES = ((4096, 4096), (4096, 1024), (11008, 4096), (4096,))  # of a Llama, in turn
TYPICAL = "256M bfloat16"
TINY_SHAPES = ((64, 128), (256,))
FORMATS = (
    *("e4m3_expanded", "dynamic_tree", "int8_companded", ("dynamic_tree", "e4m3_expanded"), "4bit_log"),
    "fp32",
)
Build = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Shape = tuple[int, ...]


def builders(formats: tuple[Any, ...]) -> dict[str, Build]:
    """Name -> a constructor. torchao's and FlashOptim's classes are imported when called."""
    found: dict[str, Build] = {"torch fused": lambda ps: torch.optim.AdamW(ps, lr=1e-3, fused=True)}
    for each in formats:
        name = each if isinstance(each, str) else " + ".join(each)
        found[f"ours {name}"] = lambda ps, each=each: optim.AdamW(ps, lr=1e-3, state_format=each)
    return found | {f"torchao {name}": _torchao(name) for name in ("fp8", "8bit")} | {"flashoptim": _flashoptim}


def _torchao(name: str) -> Build:
    def build(ps: list[nn.Parameter]) -> torch.optim.Optimizer:
        from torchao.optim import AdamW8bit, AdamWFp8

        return {"fp8": AdamWFp8, "8bit": AdamW8bit}[name](ps, lr=1e-3)  # type: ignore[no-any-return]

    return build


def _flashoptim(ps: list[nn.Parameter]) -> torch.optim.Optimizer:
    from flashoptim import FlashAdamW

    return FlashAdamW(ps, lr=1e-3)  # type: ignore[no-any-return]


def shapes_of(million: float, shapes: Sequence[Shape]) -> list[Shape]:
    """``shapes`` in turn until there are ``million`` * 10**6 elements."""
    found: list[Shape] = []
    while sum(map(math.prod, found)) < million * 1e6:
        found.append(shapes[len(found) % len(shapes)])
    return found


def parameters(shapes: Iterable[Shape], device: torch.device, dtype: torch.dtype) -> list[nn.Parameter]:
    """A parameter of each shape, with a gradient."""
    made = []
    for shape in shapes:
        p = nn.Parameter(torch.randn(shape, device=device, dtype=dtype) * 0.02)
        p.grad = torch.randn_like(p) * 1e-3
        made.append(p)
    return made


def _stepped(build: Build, ps: list[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer with its states, which the first step makes."""
    optimizer = build(ps)
    optimizer.step()
    return optimizer


def _arm(optimizer: torch.optim.Optimizer) -> Arm:
    def arm(lap: Lap) -> None:
        optimizer.step()
        lap("step")

    return arm


def least_bytes(numel: int, dtype: torch.dtype, kept: int) -> int:
    """Of a step over so many elements, with states of ``kept`` bytes."""
    return numel * dtype.itemsize * 3 + 2 * kept


def arms(case: Case, setting: Setting) -> Arms:
    """Every optimizer on the same parameters, in turn; bits per parameter of all it keeps."""
    dtype = getattr(torch, case.shape["dtype"])
    shapes, formats = (TINY_SHAPES, FORMATS[:1]) if setting.tiny else (SHAPES, FORMATS)
    ps = parameters(shapes_of(case.shape["million"], shapes), setting.device, dtype)
    numel = sum(p.numel() for p in ps)
    factories = {name: functools.partial(_stepped, build, ps) for name, build in builders(formats).items()}
    optimizers, left_out = peers.built(factories, setting.device)
    kept = {name: state_bytes(optimizer) for name, optimizer in optimizers.items()}
    work = {f"{name}/step": counted(least_bytes(numel, dtype, nbytes)) for name, nbytes in kept.items()}
    bits = {name: nbytes * 8 / numel for name, nbytes in kept.items()}
    notes = {"numel": numel, "state_bytes": kept, "state_bits_per_parameter": bits}
    return Arms({name: _arm(each) for name, each in optimizers.items()}, left_out, work, notes)


def measure(case: Case, setting: Setting) -> Row:
    """Steps, timed."""
    return kernel_row(arms(case, setting), setting)


def _case(million: float, dtype: str) -> Case:
    return Case(f"{million:g}M {dtype}", {"million": million, "dtype": dtype}, f"{million:g}M {dtype}" == TYPICAL)


BENCHMARKS = (
    Benchmark(
        "optimizer_step",
        "kernels",
        "a step of AdamW on Llama's shapes; bits per parameter of its states",
        ("torch fused", "torchao fp8", "torchao 8bit", "flashoptim"),
        tuple(_case(million, dtype) for million in (256, 17) for dtype in ("bfloat16", "float32")),
        (_case(0.016, "bfloat16"),),
        measure,
        limit=180,
        arms=arms,
    ),
)

if __name__ == "__main__":
    run_alone(BENCHMARKS, __doc__)
