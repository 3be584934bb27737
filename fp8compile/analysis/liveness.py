"""How much memory a step needs beside what it keeps: a walk over the graphs that adds up what is alive at each operation.

A value is alive from the operation that makes it to the last kernel that reads it. Which values are in memory at all is
guessed from how Inductor fuses: a pointwise value is stored only if it is returned, or if something other than pointwise
operations and reductions reads it (a matmul, a convolution, attention). Views and fused values extend the life of what they
read.

Counted elsewhere and left out here: inputs of the forward; all that is saved for backward, so that only what goes beyond it
counts; and gradients of parameters, as if they existed from the start.
Not known here: workspaces inside kernels (cuBLAS, split reductions), Inductor's reordering and reuse of buffers, values it
stores rather than computes twice, fragmentation of the allocator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch.fx import Node

from fp8compile.fx.aot import descriptor, gradients
from fp8compile.fx.graph import is_tensor, nbytes, storage_root
from fp8compile.fx.ops import is_pointwise, is_reduction, is_split, is_view
from fp8compile.fx.partition import PartitionedGraph

aten, prims = torch.ops.aten, torch.ops.prims


def workspace_bytes(split: PartitionedGraph) -> int:
    """The most that forward or backward needs at one time beyond all that is saved for backward."""
    return max(0, _in_forward(split), _in_backward(split))


def _in_forward(split: PartitionedGraph) -> int:
    """Kept values count from where they are made; until then their room is free for others."""
    given = sum(nbytes(root.meta["val"]) for root in kept_storages(split) if root.op == "placeholder")
    order, held = steps_of_forward(split)
    return most_alive(order.values(), given - split.saved_bytes(), held)


def _in_backward(split: PartitionedGraph) -> int:
    order, held = steps_of_backward(split)
    return most_alive(order.values(), 0, held)


def steps_of_forward(split: PartitionedGraph) -> tuple[dict[Node, Step], Held]:
    """The forward's steps, in its order; nothing is in memory before it but inputs, which are counted elsewhere."""
    return steps_of(split.fw.graph.nodes, set(split.inputs)), {}


def steps_of_backward(split: PartitionedGraph) -> tuple[dict[Node, Step], Held]:
    """The backward's steps, and what the forward keeps for them: freed after its last reader.

    Gradients of parameters are counted elsewhere.
    """
    used = {edge.backward for edge in split.edges}
    steps = steps_of(split.bw.graph.nodes, used | gradients_of_parameters(split))
    kept = kept_storages(split).items()
    return steps, {tuple(steps[n] for n in nodes): nbytes(root.meta["val"]) for root, nodes in kept}


def kept_storages(split: PartitionedGraph) -> dict[Node, list[Node]]:
    """Each storage saved for backward, and the backward's inputs that use it; not those that the caller owns."""
    kept: dict[Node, list[Node]] = {}
    for edge in split.edges:
        if edge.is_tensor and not split.caller_owns(root := storage_root(edge.forward)):
            kept.setdefault(root, []).append(edge.backward)
    return kept


def gradients_of_parameters(split: PartitionedGraph) -> set[Node]:
    parameters = set(map(descriptor, split.static)) - {None}
    return {storage_root(node) for desc, node in gradients(split.bw.graph) if desc in parameters}


@dataclass(eq=False)
class Step:
    """One operation of a timeline.

    Attributes:
        size: bytes of its result, if it has memory of its own.
        kind: "view", "pointwise", "reduction" or "kernel".
        reads: the steps whose results it reads.
        readers: the steps that read its result.
        counted: whether its result is counted elsewhere.
    """

    size: int = 0
    kind: str = "kernel"
    reads: list[Step] = field(default_factory=list)
    readers: list[Step] = field(default_factory=list)
    counted: bool = False

    def read(self, other: Step) -> None:
        self.reads.append(other)
        other.readers.append(self)


Held: TypeAlias = Mapping[
    tuple[Step, ...], int
]  # bytes that are there before the first step, by the steps that use them


def step_of(node: Node, counted: bool = False) -> Step:
    """A node's step, without its edges."""
    kind = (
        "view" if _is_view_or_part(node) else
        "pointwise" if is_pointwise(node) else
        "reduction" if is_reduction(node) else "kernel"
    )  # fmt: skip
    return Step(nbytes(node.meta["val"]) if is_tensor(node) else 0, kind, counted=counted)


def steps_of(nodes: Iterable[Node], counted: Set[Node]) -> dict[Node, Step]:
    """The steps of nodes that read none but each other, in their order; the results of ``counted`` are counted elsewhere."""
    steps: dict[Node, Step] = {}
    for node in nodes:
        step = steps[node] = step_of(node, node in counted)
        for parent in node.all_input_nodes:
            step.read(steps[parent])
    return steps


@dataclass(frozen=True)
class Span:
    """Bytes that are in memory from one step of a timeline to another, both included.

    Attributes:
        steps: the step whose result they are, or the steps that use what was held before the first.
        start: the position of the first step; -1 for what was held before.
        end: that of the last.
        size: bytes.
    """

    steps: tuple[Step, ...]
    start: int
    end: int
    size: int


def spans(order: Sequence[Step], held: Held) -> Iterator[Span]:
    """What is in memory, and when: first what is ``held`` before the first step, then results in the order of steps.

    What is held is freed after the last reader of the steps that use it.
    """
    position = {step: at for at, step in enumerate(order)}
    from_memory = _read_from_memory(order)
    end: dict[Step, int] = {}
    for step in reversed(order):
        fused = (end[r] if _in_registers(r, from_memory) and r.readers else position[r] for r in step.readers)
        end[step] = max(fused, default=position[step])
    for using, size in held.items():
        yield Span(using, -1, max(end[step] for step in using), size)
    for at, step in enumerate(order):
        if step.size and not step.counted and not _in_registers(step, from_memory):
            yield Span((step,), at, max(end[step], at), step.size)


def most_alive(steps: Iterable[Step], alive: int = 0, held: Held | None = None) -> int:
    """The most bytes alive at one step, starting from ``alive``, which includes what is ``held``."""
    order = list(steps)
    changes = Counter[int]()
    for span in spans(order, held or {}):
        changes[span.start] += span.size if span.start >= 0 else 0
        changes[span.end + 1] -= span.size
    most = alive
    for at in range(len(order)):
        alive += changes[at]
        most = max(most, alive)
    return most


def _in_registers(step: Step, from_memory: Mapping[Step, bool]) -> bool:
    return step.kind == "view" or (step.kind == "pointwise" and not from_memory[step])


def _read_from_memory(order: Sequence[Step]) -> dict[Step, bool]:
    found: dict[Step, bool] = {}
    for step in reversed(order):
        found[step] = any(found[r] if r.kind == "view" else r.kind == "kernel" for r in step.readers)
    return found


def is_read_from_memory(node: Node) -> bool:
    """Whether a value has a reader that does not recompute it: a matmul, for example, or the caller."""
    return any(is_read_from_memory(u) if _is_view_or_part(u) else not _fuses_its_reads(u) for u in node.users)


def _fuses_its_reads(node: Node) -> bool:
    return is_pointwise(node) or is_reduction(node)


def _is_view_or_part(node: Node) -> bool:
    parent = node.args[0] if node.args else None
    return is_view(node) or is_split(node) or (isinstance(parent, Node) and is_split(parent))
