"""What a generated kernel takes of an H200's resources, counted in its machine code (benchmarks/harness/kernel_time.py).

Instructions are counted in the machine code of each configuration that Inductor's tuner has. The fastest of those that spill
nothing counts; where all spill, the fastest of them. A loop's body counts as often as it is run; a branch that is not taken
counts too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from benchmarks.harness.kernel_time import WARPS, KernelCost

from .assembling import Cubin, assemble
from .checked import disassembled
from .kernel import COMBINED, Kernel

MULTIPROCESSORS, MOST_WARPS, MOST_PROGRAMS = 132, 64, 32
REGISTERS, REGISTER_STEP, SHARED_BYTES, SHARED_RESERVED = 65_536, 8, 233_472, 1024
LANES_OF_A_WARP = 32
SLOW_ONES = frozenset(("MUFU",))
_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)(.*?);")
_TARGET = re.compile(r"0x([0-9a-f]+)")
_EACH_SIZE = re.compile(r"'xnumel_\d+': (\d+)")
_SIZE = re.compile(r"^\s+(\w+)numel = (\d+)", re.MULTILINE)


def cost_of(kernel: Kernel, num_bytes: int | None = None) -> KernelCost | None:
    """That of its fastest configuration; None for kernels that combine several, whose sizes do not stand in them. Those of
    single numbers take a launch.

    Args:
        kernel: as generated.
        num_bytes: that it moves, where its source does not tell.
    """
    sizes = {name: int(size) for name, size in _SIZE.findall(kernel.source)}
    if COMBINED in kernel.source:
        each = [int(size) for size in _EACH_SIZE.findall(kernel.source)]
        return KernelCost(kernel.num_bytes, 0, 0, len(each), 0, WARPS, "") if set(each) == {1} else None
    if not sizes:
        return None
    moved = kernel.num_bytes if num_bytes is None else num_bytes
    return chosen(_cost(moved, cubin, sizes) for cubin in assemble([kernel]))


def chosen(costs: Iterable[KernelCost]) -> KernelCost:
    """The fastest of a kernel's configurations that spills nothing; where all spill, the fastest."""
    return min(costs, key=lambda each: (each.spilled > 0, each.us, each.issued))


def _cost(num_bytes: int, cubin: Cubin, sizes: Mapping[str, int]) -> KernelCost:
    def parts(axis: str) -> int:
        return -(-sizes[axis] // cubin.blocks.get(f"{axis.upper()}BLOCK", 1))

    programs = math.prod(parts(axis) for axis in "xyz" if axis in sizes)
    rounds = parts("r0_") if "R0_BLOCK" in cubin.blocks and "r0_" in sizes else 1
    if rows := cubin.blocks.get(
        "RSPLIT_SIZE"
    ):  # sums along rows and across them: a program takes so many, one after another
        rounds = rows // cubin.blocks["XBLOCK"]
        programs = -(-programs // rounds)
    total, slow = counted(disassembled(cubin.code), rounds)
    lanes, elements = programs * cubin.num_warps * LANES_OF_A_WARP, math.prod(sizes.values())
    warps = warps_held(programs, cubin.num_warps, cubin.registers, cubin.shared_bytes)
    described = f"{cubin.blocks}, {cubin.num_warps} warps"
    counts = num_bytes, total * lanes, slow * lanes, elements
    return KernelCost(*counts, cubin.registers, warps, described, cubin.spill_bytes)


def warps_held(programs: int, num_warps: int, registers: int, shared_bytes: int) -> float:
    """Warps that a multiprocessor holds at once: as its registers, its shared memory and the number of programs allow."""
    a_thread = max(REGISTER_STEP, -(-registers // REGISTER_STEP) * REGISTER_STEP)
    by_registers = REGISTERS // (a_thread * LANES_OF_A_WARP * num_warps)
    by_shared = SHARED_BYTES // (shared_bytes + SHARED_RESERVED)
    held = min(MOST_WARPS // num_warps, by_registers, by_shared, MOST_PROGRAMS)
    return num_warps * min(float(held), max(1.0, programs / MULTIPROCESSORS))


def counted(code: str, rounds: int) -> tuple[int, int]:
    """Instructions of a thread, and the slow ones among them; what stands in a loop is run ``rounds`` times."""
    lines = [(int(at, 16), name, rest) for at, name, rest in _LINE.findall(code) if name != "NOP"]
    loops = [(int(found[1], 16), at) for at, name, rest in lines if name == "BRA" and (found := _TARGET.search(rest))]
    bodies = [
        (first, last) for first, last in loops if first < last
    ]  # a branch back; one to itself is behind the end
    times = [rounds if any(first <= at <= last for first, last in bodies) else 1 for at, _, _ in lines]
    slow = sum(each for each, (_, name, _) in zip(times, lines, strict=True) if name in SLOW_ONES)
    return sum(times), slow
