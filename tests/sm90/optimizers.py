"""Optimizer steps to lower: for each case the graphs of one step, its parameters' tensors, and the least it must move."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.kernel_time import KernelCost
from fp8compile import optim
from fp8compile.optim import compiled_step, kernel_text, one_launch, row_views, small_parameters, traced_once
from fp8compile.optim.open_sizes import Sizes, numbers

from . import fake_h100
from .assembling import resource_usage
from .checked import check, instructions
from .kernel_cost import LANES_OF_A_WARP, SLOW_ONES, warps_held
from .lowering import Lowered, LoweredGraph, lower_backend, lowering_config

GROUP = 128  # elements that share a scale, whatever their codes take
ONLY_READ = ("grad", "numbers", "step", "stream")


@dataclass(frozen=True)
class Case:
    """A parameter, and how it is updated."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    optimizer: str = "AdamW"
    state_format: Any = "e4m3_expanded"
    master: str = "none"
    betas: tuple[float, float] = (0.9, 0.999)

    def build(self, values: Callable[..., Tensor] = torch.empty) -> optim.EncodedOptimizer:
        """The optimizer, its parameter with a gradient, all filled by ``values(shape)``."""
        p = nn.Parameter(values(self.shape).to(self.dtype))
        p.grad = values(self.shape).to(self.dtype)
        options: dict[str, Any] = {"state_format": self.state_format, "master": self.master, "betas": self.betas}
        return getattr(optim, self.optimizer)([p], lr=1e-3, compiled=False, **options)  # type: ignore[no-any-return]


Chunk = tuple[compiled_step.Signature, list[tuple[dict[str, Tensor], Sizes]]]


def chunks_of(optimizer: optim.EncodedOptimizer) -> tuple[list[Chunk], int]:
    """What a step hands to compiled code, and the bytes of all of it, written ones twice."""
    chunks: dict[compiled_step.Signature, list[tuple[dict[str, Tensor], Sizes]]] = {}
    least = 0
    made = (optimizer.step_function(p) for p in optimizer.param_groups[0]["params"])
    steps = [compiled_step.laid_out(*each) for each in made]
    every = small_parameters.pieces_of_all((plan, tensors["param"]) for plan, tensors, _ in steps)
    for (plan, tensors, _), pieces in zip(steps, every, strict=True):
        unread = ("param",) if plan.master in ("fp32", "fp16_scaled") else ()  # the copy is read in its place
        for name, t in tensors.items():
            least += t.nbytes * (1 if name in (*ONLY_READ, *unread) else 2)
        for piece, view in pieces:
            signature, views, sizes = compiled_step.signed(piece, row_views.viewed(tensors, view))
            chunks.setdefault(signature, []).append((views, sizes))
    return list(chunks.items()), least


def lowered_chunk(chunk: Chunk, *, execute: bool = False) -> tuple[LoweredGraph, Callable[[], None]]:
    """A chunk lowered, tuned for the sizes of its first piece, and what runs its pieces in place, one after another."""
    signature, several = chunk
    lowered, sizes = Lowered(), several[0][1]
    graph, taken, fakes = compiled_step.traced_step(signature, sizes)
    assert all(fakes.fit([each]) for _, each in several)
    with lowering_config(compiled_step.inductor_options()), torch.no_grad():
        inner = compiled_step.with_groups_whole(lower_backend(lowered, execute=execute))
        compiled = traced_once.lowered(graph, taken, fakes.mode, inner)

    def run() -> None:
        with torch.no_grad():
            for tensors, each in several:
                compiled(*numbers([each]), *tensors.values())

    return lowered.only, run


@dataclass(frozen=True)
class Together:
    """The kernel of many parameters as assembled.

    Attributes:
        elements: of a thread, as Triton sees them: of a state in planes one is several values.
        registers: per thread.
        spilled: bytes per thread.
    """

    code: bytes
    ptx: str
    elements: float
    registers: int
    spilled: int


def together(graph: LoweredGraph, signature: compiled_step.Signature) -> Together:
    """What one launch for many parameters runs, lowered for sm_90 and assembled; an address is new at every step."""
    import triton
    from triton.compiler import ASTSource

    written, rows = _only_kernel(graph), _rows(graph, signature)
    arguments = graph.arguments(*graph.kernels)
    fresh = [next(i for i, each in enumerate(arguments) if arguments.count(each) == 1)]
    same = kernel_text.same_pointers(written, [arguments], fresh)
    function = one_launch.loaded(kernel_text.for_many(written, fresh, same))
    types = {"table": "*i64", "fresh": "*i64", "owners": "*i32", "XBLOCK": "constexpr"}
    source = ASTSource(function, types, {(3,): rows}, {(i,): [["tt.divisibility", 16]] for i in range(3)})
    made = triton.compile(source, target=fake_h100.target(), options={"num_warps": one_launch.WARPS})
    check(kernel_text.NAME, made.asm["ptx"], made.asm["cubin"])
    registers, stack, _, local = resource_usage(made.asm["cubin"])
    elements = rows * written.row / (32 * one_launch.WARPS)
    return Together(made.asm["cubin"], made.asm["ptx"], elements, registers, stack + local)


def _only_kernel(graph: LoweredGraph) -> kernel_text.KernelText:
    [kernel] = graph.kernels.values()
    written = kernel_text.parsed(kernel.source)
    assert written is not None, kernel.name
    return written


def _rows(graph: LoweredGraph, signature: compiled_step.Signature) -> int:
    return one_launch.rows_of_a_block(_only_kernel(graph), groups=signature.plan.groups_of_a_block)


def cost_together(graph: LoweredGraph, signature: compiled_step.Signature, of: int, elements: int) -> KernelCost:
    """What one launch for parameters of ``elements`` in all costs; ``graph`` was lowered for a parameter of ``of``.

    Instructions are counted where they stand: a branch that is not taken counts, a loop's body counts once.
    """
    made = together(graph, signature)
    found = instructions(made.code)
    programs = elements / (_rows(graph, signature) * (GROUP if _only_kernel(graph).row > 1 else 1))
    lanes = programs * one_launch.WARPS * LANES_OF_A_WARP
    slow = sum(found[kind] for kind in SLOW_ONES)
    warps = warps_held(math.ceil(programs), one_launch.WARPS, made.registers, 0)
    counts = round(graph.num_bytes / of * elements), found.total() * lanes, slow * lanes, elements
    return KernelCost(*counts, made.registers, warps, "", made.spilled)
