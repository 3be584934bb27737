"""What a generated kernel is predicted to take on an H200: the longest of its bytes, its instructions, and the slow ones.

    us = max(bytes / BYTES, instructions * lanes / LANES, slow instructions * lanes / SLOW)

The rates are those that one H200 reached (copies, lanes, lanes of the slow pipe). Instructions are counted in the machine
code of each configuration that Inductor's tuner has and that spills nothing; the fastest counts. A loop's body counts as
often as it is run; a branch that is not taken counts too. Left out: what few warps cost (registers), the L2 cache, launches.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from .assembling import Cubin, assemble
from .checked import disassembled
from .lowering import Kernel

BYTES, LANES, SLOW = 4.2e12, 3.3e13, 4.2e12  # a second
LANES_OF_A_WARP = 32
SLOW_ONES = frozenset(
    ("MUFU", "F2F", "F2I", "I2F", "FRND", "F2FP")
)  # the last: half of Hopper's lanes or fewer convert
_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)(.*?);")
_TARGET = re.compile(r"0x([0-9a-f]+)")
_SIZE = re.compile(r"^\s+(\w+)numel = (\d+)", re.MULTILINE)


@dataclass(frozen=True)
class KernelCost:
    """One launch. ``instructions`` and ``slow`` are for each element that it goes over; registers are a thread's."""

    bytes_us: float
    lanes_us: float
    slow_us: float
    elements: int
    instructions: float
    slow: float
    registers: int
    blocks: str

    @property
    def us(self) -> float:
        return max(self.bytes_us, self.lanes_us, self.slow_us)


def cost_of(kernel: Kernel) -> KernelCost | None:
    """That of its fastest configuration; None for kernels that combine several, whose sizes do not stand in them."""
    sizes = {name: int(size) for name, size in _SIZE.findall(kernel.source)}
    if not sizes or "ComboKernelGrid" in kernel.source:
        return None
    found = [_cost(kernel, cubin, sizes) for cubin in assemble([kernel]) if not cubin.spill_bytes]
    return min(found, key=lambda each: (each.us, each.lanes_us), default=None)


def _cost(kernel: Kernel, cubin: Cubin, sizes: dict[str, int]) -> KernelCost:
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
    return KernelCost(
        kernel.num_bytes / BYTES * 1e6,
        total * lanes / LANES * 1e6,
        slow * lanes / SLOW * 1e6,
        elements,
        total * lanes / elements,
        slow * lanes / elements,
        cubin.registers,
        f"{cubin.blocks}, {cubin.num_warps} warps",
    )


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
