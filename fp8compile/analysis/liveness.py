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


def _most_alive(graph: Graph, counted: set[Node], alive: int, held: dict[tuple[Node, ...], int]) -> int:
    """The most bytes alive at one operation, starting from ``alive``; nodes that are ``counted`` elsewhere are left out.

    ``held`` are storages that the caller has counted. Each is freed after the last reader of the nodes that use it.
    """
    order = list(graph.nodes)
    end = _last_reads(order)
    leaving = Counter[int]()
    for nodes, size in held.items():
        leaving[max(end[node] for node in nodes)] += size
    most = alive
    for at, node in enumerate(order):
        if is_tensor(node) and node not in counted and not _in_registers(node):
            size = nbytes(node.meta["val"])
            alive += size
            leaving[max(end[node], at)] += size
        most = max(most, alive)
        alive -= leaving[at]
    return most


def _last_reads(order: list[Node]) -> dict[Node, int]:
    """For each node, the position of the last kernel that reads it: its own last user, or the reader of what fuses it."""
    position = {node: at for at, node in enumerate(order)}
    end: dict[Node, int] = {}
    for node in reversed(order):
        reads = [end[user] if _in_registers(user) and user.users else position[user] for user in node.users]
        end[node] = max(reads, default=position[node])
    return end


def _in_registers(node: Node) -> bool:
    """Whether no memory is allocated for the node: a view, or pointwise and fused into all that reads it."""
    if _is_view_or_part(node):
        return True
    return is_pointwise(node) and not is_read_from_memory(node)


def is_read_from_memory(node: Node) -> bool:
    """Whether a value has a reader that does not recompute it: a matmul, for example, or the caller."""
    return any(is_read_from_memory(u) if _is_view_or_part(u) else not _fuses_its_reads(u) for u in node.users)


def _fuses_its_reads(node: Node) -> bool:
    return is_pointwise(node) or is_reduction(node)


def _is_view_or_part(node: Node) -> bool:
    parent = node.args[0] if node.args else None
    return is_view(node) or is_split(node) or (isinstance(parent, Node) and is_split(parent))
