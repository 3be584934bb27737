"""Which values of a graph are in memory, and which are computed in each kernel that reads them: Inductor's rules as a walk.

    no pointwise operation            its result is stored: a matmul, a convolution, attention, a reduction, random numbers
    read by such a kernel, returned   stored
    takes many tensors to compute     stored: more than ``most`` tensors in memory
    read several times                stored if it takes more than ``few`` tensors; on a CPU also if it takes an exponential
    a residual                        stored where a pass says so (fp8compile/analysis/residuals.py)

The rules are ``should_realize_on_reuse`` and ``has_exceeded_max_reads`` of ``torch/_inductor/ir.py``, and its ``graph.py``.
Ours leave room for decodes (``FUSION`` of ``compiler/inductor_options.py``). What takes no codes and is read several times is
stored by Inductor's own limit all the same: passes/store_sums.py says so of what several kernels read.

Left out: the number of operations of an expression, which Inductor limits too, and layouts that it asks for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch.fx import Node

from fp8compile import _torch as private
from fp8compile.fx.graph import AWAITED, DEVICE, MOVED, is_tensor, nbytes
from fp8compile.fx.ops import is_pointwise, is_reduction, is_view_or_part, opname

EXPONENTIALS = ("exp", "log", "log10", "log1p", "log2", "sigmoid", "tanh", "silu")  # each is computed once on a CPU


class RealizeLimits(NamedTuple):
    """How many stored tensors a value may take to compute, before Inductor stores it: read several times; read at all."""

    few: int
    most: int


PLAIN = RealizeLimits(4, 8)  # Inductor's own


def limits_in_force() -> RealizeLimits:
    """Those of the compilation that runs."""
    most = private.inductor_config.realize_acc_reads_threshold
    return RealizeLimits(private.inductor_config.realize_reads_threshold, PLAIN.most if most is None else most)


@dataclass(eq=False)
class TimelineStep:
    """One operation of a timeline.

    Attributes:
        size: bytes of its result, if it has memory of its own.
        kind: "view", "pointwise", "reduction" or "kernel".
        reads: the steps whose results it reads.
        readers: the steps that read its result.
        counted: whether its result is counted elsewhere.
        stored: whether a pass has its result stored.
        is_dear: whether a CPU computes it once.
        holds_codes: whether what it makes is codes, bits or the like: a number in less than two bytes.
    """

    size: int = 0
    kind: str = "kernel"
    reads: list[TimelineStep] = field(default_factory=list)
    readers: list[TimelineStep] = field(default_factory=list)
    counted: bool = False
    stored: bool = False
    is_dear: bool = False
    holds_codes: bool = False

    def read(self, other: TimelineStep) -> None:
        self.reads.append(other)
        other.readers.append(self)

    def alone(self, counted: bool = False, stored: bool = False) -> TimelineStep:
        """The same operation without its edges, for another timeline."""
        return replace(self, reads=[], readers=[], counted=counted, stored=stored)


def step_of(node: Node) -> TimelineStep:
    """A node's step, without its edges. A copy to the host is a kernel whose result takes nothing of the device's memory."""
    if (moved := node.meta.get(MOVED)) is not None:
        return TimelineStep(
            nbytes(node.meta["val"]) if moved == DEVICE else 0, "view" if moved == AWAITED else "kernel"
        )
    kind = (
        "view" if is_view_or_part(node) else
        "pointwise" if is_pointwise(node) else
        "reduction" if is_reduction(node) else "kernel"
    )  # fmt: skip
    if not is_tensor(node):
        return TimelineStep(0, kind)
    value = node.meta["val"]
    is_dear = opname(node) in EXPONENTIALS and value.device.type == "cpu"
    return TimelineStep(
        nbytes(value), kind, is_dear=is_dear, holds_codes=value.itemsize == 1 and value.dtype != torch.bool
    )


def steps_of(
    nodes: Iterable[Node],
    counted: Set[Node] = frozenset(),
    stored: Collection[Node] = (),
    known: Mapping[Node, TimelineStep] | None = None,
) -> dict[Node, TimelineStep]:
    """The steps of nodes that read none but each other, in their order; the results of ``counted`` are counted elsewhere,
    those of ``stored`` are in memory. ``known`` are steps of other timelines."""
    steps: dict[Node, TimelineStep] = {}
    for node in nodes:
        step = (known[node] if known else step_of(node)).alone(node in counted, node in stored)
        steps[node] = step
        for parent in node.all_input_nodes:
            step.read(steps[parent])
    return steps


def in_registers(
    order: Sequence[TimelineStep], limits: RealizeLimits, without_codes: int = PLAIN.few
) -> set[TimelineStep]:
    """The steps of a timeline whose results are not stored: views, and what is computed where it is read.

    Read several times, what takes no codes to compute may take the fewer of ``limits`` and of ``without_codes`` tensors.
    """
    by_kernels, times = _read_by_kernels(order), _times_read(order)
    behind: dict[TimelineStep, set[TimelineStep]] = {}  # of each that is not stored, the stored ones that it takes
    dear: set[TimelineStep] = set()
    for step in order:
        if step.kind not in ("view", "pointwise") or (step.kind == "pointwise" and by_kernels[step]):
            continue
        takes = {each for read in step.reads for each in behind.get(read, (read,))}
        is_dear = step.is_dear or any(read in dear for read in step.reads)
        few = limits.few if any(each.holds_codes for each in takes) else min(limits.few, without_codes)
        several = times[step] > 1 and (len(takes) > few or is_dear)
        if step.kind == "pointwise" and (step.stored or several or len(takes) > limits.most):
            continue
        behind[step] = takes
        if is_dear:
            dear.add(step)
    return set(behind)


def _read_by_kernels(order: Sequence[TimelineStep]) -> dict[TimelineStep, bool]:
    found: dict[TimelineStep, bool] = {}
    for step in reversed(order):
        found[step] = any(found[r] if r.kind == "view" else r.kind == "kernel" for r in step.readers)
    return found


def _times_read(order: Sequence[TimelineStep]) -> dict[TimelineStep, int]:
    found: dict[TimelineStep, int] = {}
    for step in reversed(order):
        found[step] = max([len(step.readers), *(found[r] for r in step.readers if r.kind == "view")])
    return found
