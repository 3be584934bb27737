"""What a picture of a training graph needs beside its operations: what goes from forward to backward, what is alive when.

    bytes alive at an operation = sum of the lifetimes that hold it
    most of them                = GraphReport.saved_bytes + GraphReport.workspace_bytes

Both halves stand one after the other: operations of the backward come after those of the forward. Left out, as in
``workspace_bytes``: parameters, their gradients, what the caller owns. Everything is predicted from the graph.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

# What a storage that is kept holds, beside codes and what was left for a reason (the labels of reporting/waterfall.py).
CALLERS = "owned by the caller: a parameter, or data"
REGIONS = "kept by a nested compile region"
ON_HOST = "waits on the host"

# Kinds of lifetimes, in the order in which a chart stacks them.
KEPT_CODES, KEPT, FORWARD, BACKWARD = "saved as codes", "saved as it is", "forward only", "backward only"
KINDS = (KEPT_CODES, KEPT, FORWARD, BACKWARD)


@dataclass(frozen=True)
class KeptValue:
    """A value that the forward hands to the backward.

    Attributes:
        forward: its node in the forward.
        backward: the backward's input that takes it.
        storage: the node of the forward whose memory it uses; several values may share one.
        nbytes: bytes of that storage; 0 where they are not saved for the backward's sake.
        label: what the storage holds: a label of the waterfall's parts, ``CALLERS``, ``REGIONS`` or ``ON_HOST``.
    """

    forward: str
    backward: str
    storage: str
    nbytes: int
    label: str


@dataclass(frozen=True)
class Lifetime:
    """Bytes in memory.

    Attributes:
        name: the node whose result they are.
        value: dtype and shape, ``bf16[8, 64]``.
        module: where the value was made.
        kind: one of ``KINDS``.
        start: position of the first operation that they are there for, in ``MemoryTimeline.operations``.
        end: position of the last.
        nbytes: bytes.
    """

    name: str
    value: str
    module: str
    kind: str
    start: int
    end: int
    nbytes: int


@dataclass(frozen=True)
class MemoryTimeline:
    """What is in memory at each operation of a step of one graph.

    Attributes:
        operations: the names of the nodes, the forward's and then the backward's.
        forward: how many of them are the forward's.
        lifetimes: what is in memory, in the order in which it appears.
    """

    operations: tuple[str, ...]
    forward: int
    lifetimes: tuple[Lifetime, ...]

    @cached_property
    def alive(self) -> tuple[int, ...]:
        """Bytes alive at each operation."""
        changes = Counter[int]()
        for each in self.lifetimes:
            changes[each.start] += each.nbytes
            changes[each.end + 1] -= each.nbytes
        return tuple(accumulate(changes[at] for at in range(len(self.operations))))

    @property
    def peak(self) -> int:
        """The position of the first operation with the most bytes alive."""
        return max(range(len(self.alive)), key=self.alive.__getitem__, default=0)

    @property
    def at_peak(self) -> tuple[Lifetime, ...]:
        """What is alive there, the largest first."""
        there = (each for each in self.lifetimes if each.start <= self.peak <= each.end)
        return tuple(sorted(there, key=lambda each: -each.nbytes))


@dataclass(frozen=True)
class Picture:
    """Of one training graph: what its forward keeps, and its timeline beside that of plain Inductor."""

    kept: tuple[KeptValue, ...] = ()
    ours: MemoryTimeline = MemoryTimeline((), 0, ())
    plain: MemoryTimeline = MemoryTimeline((), 0, ())
