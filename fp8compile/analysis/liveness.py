"""How much memory a step needs beside what it keeps: a walk over the graphs that adds up what is alive at each operation.

A value is alive from the operation that makes it to the last kernel that reads it. Which values are in memory at all is
what Inductor's rules say (fp8compile/analysis/stored_values.py). Views and fused values extend the life of what they read.

Left out: inputs of the forward, which are there in any case. Figures made of the walk:

    workspace            what goes beyond all that is saved for backward; gradients of parameters are counted elsewhere, as if
                         they were there from the start
    forward, backward    all that is alive, with gradients of parameters from where they are made to the end: what is
                         allocated in a step that begins without gradients

Not known here: workspaces inside kernels (cuBLAS, split reductions), kernels that Inductor fuses although they stand far
apart, its reordering and reuse of buffers, fragmentation of the allocator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch.fx import Graph, Node

from fp8compile.analysis.residuals import is_stored_as_codes, residuals_of, stored_residuals
from fp8compile.analysis.stored_values import RealizeLimits, TimelineStep, in_registers, limits_in_force, steps_of
from fp8compile.fx.aot import descriptor, gradients
from fp8compile.fx.graph import is_on_host, is_tensor, nbytes, storage_root
from fp8compile.fx.partition import PartitionedGraph

Held: TypeAlias = Mapping[
    tuple[TimelineStep, ...], int
]  # bytes that are there before the first step, by the steps that use them


@dataclass(frozen=True)
class Needs:
    """Bytes that a step needs, as above: of its workspace, and at the peak of each half."""

    workspace: int
    forward: int
    backward: int

    @property
    def peak(self) -> int:
        return max(self.forward, self.backward)


def needs(split: PartitionedGraph, limits: RealizeLimits | None = None) -> Needs:
    """What a step needs. ``limits`` are those that Inductor computes values again within; None: those of the compilation
    that runs."""
    limits = limits or limits_in_force()
    saved, forward, stored = split.saved_bytes(), _in_forward(split, limits), _stored_residuals(split.bw.graph)
    without, backward = (
        most_alive(order.values(), limits, 0, held)
        for order, held in (steps_of_backward(split, counted, stored) for counted in (False, True))
    )
    return Needs(max(0, forward, without), saved + max(0, forward), saved + max(0, backward))


def _in_forward(split: PartitionedGraph, limits: RealizeLimits) -> int:
    """Kept values count from where they are made; until then their room is free for others."""
    given = sum(nbytes(root.meta["val"]) for root in kept_storages(split) if root.op == "placeholder")
    order, held = steps_of_forward(split)
    return most_alive(order.values(), limits, given - split.saved_bytes(), held)


def steps_of_forward(split: PartitionedGraph) -> tuple[dict[Node, TimelineStep], Held]:
    """The forward's steps, in its order; nothing is in memory before it but inputs, which are counted elsewhere."""
    graph = split.fw.graph
    return steps_of(graph.nodes, set(split.inputs), _stored_residuals(graph)), {}


def steps_of_backward(
    split: PartitionedGraph, with_gradients: bool = False, stored: set[Node] | None = None
) -> tuple[dict[Node, TimelineStep], Held]:
    """The backward's steps, and what the forward keeps for them: freed after its last reader.

    Gradients of parameters are counted elsewhere, or here ``with_gradients``. ``stored`` are its residuals, if known.
    """
    graph = split.bw.graph
    counted = {edge.backward for edge in split.edges}
    counted |= set() if with_gradients else gradients_of_parameters(split)
    steps = steps_of(graph.nodes, counted, _stored_residuals(graph) if stored is None else stored)
    kept = kept_storages(split).items()
    return steps, {tuple(steps[n] for n in nodes): nbytes(root.meta["val"]) for root, nodes in kept}


def _stored_residuals(graph: Graph) -> set[Node]:
    return set(stored_residuals(residuals_of(graph), is_stored_as_codes))


def kept_storages(split: PartitionedGraph) -> dict[Node, list[Node]]:
    """Each storage saved for backward, and the backward's inputs that use it; none of the caller's, none on the host."""
    kept: dict[Node, list[Node]] = {}
    for edge in split.edges:
        if edge.is_tensor and not split.caller_owns(root := storage_root(edge.forward)) and not is_on_host(root):
            kept.setdefault(root, []).append(edge.backward)
    return kept


def gradients_of_parameters(split: PartitionedGraph) -> set[Node]:
    return set(map(storage_root, _of_parameters(split)))


def gradient_bytes(split: PartitionedGraph) -> int:
    """Bytes of the gradients of parameters that a backward makes."""
    return sum(nbytes(node.meta["val"]) for node in _of_parameters(split) if is_tensor(node))


def _of_parameters(split: PartitionedGraph) -> list[Node]:
    parameters = set(map(descriptor, split.static)) - {None}
    return [node for desc, node in gradients(split.bw.graph) if desc in parameters]


@dataclass(frozen=True)
class Span:
    """Bytes that are in memory from one step of a timeline to another, both included.

    Attributes:
        steps: the step whose result they are, or the steps that use what was held before the first.
        start: the position of the first step; -1 for what was held before.
        end: that of the last.
        size: bytes.
    """

    steps: tuple[TimelineStep, ...]
    start: int
    end: int
    size: int


def spans(order: Sequence[TimelineStep], limits: RealizeLimits, held: Held) -> Iterator[Span]:
    """What is in memory, and when: first what is ``held`` before the first step, then results in the order of steps.

    What is held is freed after the last reader of the steps that use it.
    """
    position = {step: at for at, step in enumerate(order)}
    fused = in_registers(order, limits)
    end: dict[TimelineStep, int] = {}
    for step in reversed(order):
        ends = (end[r] if r in fused and r.readers else position[r] for r in step.readers)
        end[step] = max(ends, default=position[step])
    for using, size in held.items():
        yield Span(using, -1, max(end[step] for step in using), size)
    for at, step in enumerate(order):
        if step.size and not step.counted and step not in fused:
            yield Span((step,), at, max(end[step], at), step.size)


def most_alive(steps: Iterable[TimelineStep], limits: RealizeLimits, alive: int = 0, held: Held | None = None) -> int:
    """The most bytes alive at one step, starting from ``alive``, which includes what is ``held``."""
    order = list(steps)
    changes = Counter[int]()
    for span in spans(order, limits, held or {}):
        changes[span.start] += span.size if span.start >= 0 else 0
        changes[span.end + 1] -= span.size
    most = alive
    for at in range(len(order)):
        alive += changes[at]
        most = max(most, alive)
    return most
