"""Follow the bytes of a kernel's machine code (SASS, as ``cuobjdump -sass`` prints it) into its stores: which are stale.

A stored byte is stale where its register was not written before, or only by an earlier iteration of the loop. A store is
wrong where a byte is stale, and it stores single bytes or FP8 codes. ptxas below 13.0 makes such code (compiler/ptxas.py).

Instructions are followed in the order of their addresses. A loop is followed twice: once entered from above, once from its
end. What was written before a loop is not stale in it. A guarded write leaves the old byte possible. Arithmetic makes a new
byte: what it makes of a stale one is not seen, nor is what was spilled.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_REGISTER = re.compile(r"[-|~!]*R(\d+|Z)\b")
_STORES = ("STS", "STG", "ST.")
_WITHOUT_RESULT = re.compile(r"\w*SETP|PLOP3|R2P|FCHK|WARPSYNC|BAR|BR[AX]|CALL|RET|NANOSLEEP")
_SHIFTS = {"0x8": 1, "0x10": 2, "0x18": 3}
_FACTORS = {"0x100": 1, "0x10000": 2, "0x1000000": 3}


class Instruction(NamedTuple):
    address: int
    guard: str
    opcode: str
    operands: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.address:04x} {self.opcode} {', '.join(self.operands)}"


class Origin(NamedTuple):
    """What wrote a byte: when, and whether as an FP8 code, or as what came back from shared memory."""

    time: int
    is_code: bool


Byte = frozenset[Origin]  # all that may have written it; empty: a constant 0
Bytes = list[Byte]
UNWRITTEN = Origin(-1, is_code=False)
ZERO: Byte = frozenset()


def stale_stores(sass: str) -> list[Instruction]:
    """The wrong stores of the one kernel in ``sass``, by address."""
    followed = _Followed(list(instructions(sass)))
    followed.run(0, len(followed.code) - 1)
    return [followed.wrong[address] for address in sorted(followed.wrong)]


def instructions(sass: str) -> Iterator[Instruction]:
    for line in sass.splitlines():
        if match := _INSTRUCTION.match(line):
            address, guard, opcode, operands = match.groups()
            parts = tuple(part.strip().replace(".reuse", "") for part in operands.split(","))
            yield Instruction(int(address, 16), guard or "", opcode, parts)


def loops_of(code: list[Instruction]) -> dict[int, int]:
    """Where each loop begins and ends, by branches back."""
    place = {each.address: index for index, each in enumerate(code)}
    found: dict[int, int] = {}
    for index, each in enumerate(code):
        target = int(each.operands[-1], 16) if re.fullmatch(r"0x[0-9a-f]+", each.operands[-1]) else each.address
        if each.opcode.startswith("BRA") and target < each.address and target in place:
            found[place[target]] = index
    return found


@dataclass
class _Followed:
    code: list[Instruction]
    registers: dict[int, Bytes] = field(default_factory=dict)
    time: int = 0
    last_iteration: set[int] = field(default_factory=set)
    wrong: dict[int, Instruction] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.loops = loops_of(self.code)

    def run(self, first: int, last: int) -> None:
        at = first
        while at <= last:
            end = self.loops.get(at)
            if end is None:
                self.step(self.code[at])
                at += 1
            else:
                self.loop(at, min(end, last))
                at = end + 1

    def loop(self, first: int, last: int) -> None:
        end = self.loops.pop(first)
        times = self.iteration(first, last)
        self.last_iteration |= times
        self.iteration(first, last)
        self.last_iteration -= times
        self.loops[first] = end
        self.time += 1

    def iteration(self, first: int, last: int) -> set[int]:
        self.time += 1
        start = self.time
        self.run(first, last)
        return set(range(start, self.time + 1))

    def step(self, each: Instruction) -> None:
        if each.opcode.startswith(_STORES):
            if self.is_wrong(each):
                self.wrong[each.address] = each
        elif (result := _result(each)) is not None:
            made = self.made(each)
            for k in range(_width(each)):
                new = made if k == 0 or each.opcode.startswith("LDS") else self.new()
                self.write(result + k, new, guarded=each.guard not in ("", "@PT"))

    def is_wrong(self, store: Instruction) -> bool:
        first = _register(store.operands[-1])
        if first is None or first == "Z":
            return False
        stored = [self.read(int(first) + k // 4)[k % 4] for k in range(_num_bytes(store.opcode))]
        origins = [origin for byte in stored for origin in byte]
        stale = any(origin == UNWRITTEN or origin.time in self.last_iteration for origin in origins)
        return stale and (len(stored) == 1 or any(origin.is_code for origin in origins))

    def read(self, register: int) -> Bytes:
        return self.registers.get(register, [frozenset({UNWRITTEN})] * 4)

    def write(self, register: int, new: Bytes, *, guarded: bool) -> None:
        if guarded:
            new = [a | b for a, b in zip(self.read(register), new, strict=True)]
        self.registers[register] = new

    def new(self, *, is_code: bool = False) -> Bytes:
        return [frozenset({Origin(self.time, is_code)})] * 4

    def operand(self, text: str) -> Bytes:
        register = _register(text)
        if register == "Z":
            return [ZERO] * 4
        return self.new() if register is None else self.read(int(register))

    def made(self, each: Instruction) -> Bytes:
        """The bytes of its (first) result."""
        opcode, (_, *sources) = each.opcode, each.operands
        if "MERGE_C" in opcode:
            return self.new(is_code=True)[:2] + (self.operand(sources[2]) if len(sources) > 2 else [ZERO] * 4)[:2]
        if opcode.startswith("LDS"):
            return self.new(is_code=True)
        if opcode == "MOV" or opcode.startswith("IMAD.MOV"):
            return list(self.operand(sources[-1]))
        if opcode.startswith("PRMT") and sources[1].startswith("0x"):
            both, selector = self.operand(sources[0]) + self.operand(sources[2]), int(sources[1], 16)
            return [both[selector >> 4 * k & 7] for k in range(4)]
        return self.moved(opcode, sources)

    def moved(self, opcode: str, sources: list[str]) -> Bytes:
        """By shifts of whole bytes and by masks; else what was computed."""
        if opcode.startswith("SHF.R") and sources[0] == "RZ" and sources[1] in _SHIFTS:
            by, source = _SHIFTS[sources[1]], self.operand(sources[2])
            return source[by:] + [ZERO if "U32" in opcode else source[3]] * by
        if opcode.startswith(("IMAD.U32", "IMAD.SHL")) and sources[1] in _FACTORS and sources[2] == "RZ":
            by = _FACTORS[sources[1]]
            return [ZERO] * by + self.operand(sources[0])[: 4 - by]
        if not opcode.startswith("LOP3"):
            return self.new()
        operands = [text for text in sources if _register(text) is not None]
        read = [self.operand(text) for text in operands]
        mask = int(sources[1], 16) if "0xc0" in sources and sources[1].startswith("0x") else 2**32 - 1
        return [ZERO.union(*(each[k] for each in read)) if mask >> 8 * k & 255 else ZERO for k in range(4)]


def _register(text: str) -> str | None:
    match = _REGISTER.match(text)
    return match[1] if match else None


def _result(each: Instruction) -> int | None:
    """The first register that it writes, if any: what stands before are predicates."""
    if _WITHOUT_RESULT.match(each.opcode):
        return None
    after = next((text for text in each.operands if not re.match(r"!?U?P", text)), "")
    register = _register(after)
    return int(register) if register and register != "Z" else None


def _width(each: Instruction) -> int:
    """Registers of its result."""
    if ".128" in each.opcode:
        return 4
    if match := re.match(r"LDSM\.\d+\.\w+\.([24])", each.opcode):  # so many 8x8 matrices, a register each
        return int(match[1])
    pairs = ".64" in each.opcode or ".WIDE" in each.opcode or each.opcode == "CS2R"
    return 2 if pairs else 1


def _num_bytes(opcode: str) -> int:
    sizes = {".128": 16, ".64": 8, ".U16": 2, ".U8": 1}
    return next((size for suffix, size in sizes.items() if suffix in opcode), 4)
