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
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

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
    kept = _kept(split)
    given = sum(nbytes(root.meta["val"]) for root in kept if root.op == "placeholder")
    return _most_alive(split.fw.graph, set(split.inputs), given - split.saved_bytes(), {})


def _in_backward(split: PartitionedGraph) -> int:
    """Kept values are freed after their last reader; gradients of parameters are counted elsewhere."""
    used = {edge.backward for edge in split.edges}
    held = {tuple(edges): nbytes(root.meta["val"]) for root, edges in _kept(split).items()}
    return _most_alive(split.bw.graph, used | gradients_of_parameters(split), 0, held)


def _kept(split: PartitionedGraph) -> dict[Node, list[Node]]:
    """Each storage saved for backward, and the backward's inputs that use it."""
    kept: dict[Node, list[Node]] = {}
    for edge in split.edges:
        if edge.is_tensor and not split.caller_owns(root := storage_root(edge.forward)):
            kept.setdefault(root, []).append(edge.backward)
    return kept


def gradients_of_parameters(split: PartitionedGraph) -> set[Node]:
    parameters = set(map(descriptor, split.static)) - {None}
    return {storage_root(node) for desc, node in gradients(split.bw.graph) if desc in parameters}


def _most_alive(graph: Graph, counted: Set[Node], alive: int, held: Mapping[tuple[Node, ...], int]) -> int:
    """The most bytes alive at one operation of a graph; see ``most_alive``."""
    steps = steps_of(graph.nodes, counted)
    return most_alive(steps.values(), alive, {tuple(steps[n] for n in nodes): size for nodes, size in held.items()})


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


def most_alive(steps: Iterable[Step], alive: int = 0, held: Mapping[tuple[Step, ...], int] | None = None) -> int:
    """The most bytes alive at one step, starting from ``alive``.

    ``held`` are bytes within ``alive``. Each is freed after the last reader of the steps that use it.
    """
    order = list(steps)
    position = {step: at for at, step in enumerate(order)}
    from_memory = _read_from_memory(order)
    end: dict[Step, int] = {}
    for step in reversed(order):
        fused = (end[r] if _in_registers(r, from_memory) and r.readers else position[r] for r in step.readers)
        end[step] = max(fused, default=position[step])
    leaving = Counter[int]()
    for using, size in (held or {}).items():
        leaving[max(end[step] for step in using)] += size
    most = alive
    for at, step in enumerate(order):
        if step.size and not step.counted and not _in_registers(step, from_memory):
            alive += step.size
            leaving[max(end[step], at)] += step.size
        most = max(most, alive)
        alive -= leaving[at]
    return most


def _in_registers(step: Step, from_memory: Mapping[Step, bool]) -> bool:
    return step.kind == "view" or (step.kind == "pointwise" and not from_memory[step])


def _read_from_memory(order: list[Step]) -> dict[Step, bool]:
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
