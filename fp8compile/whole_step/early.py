"""The order of a whole step: each update directly behind its gradient and the last read of what it writes. No number changes.

    ..., g_2, reads of p_2, g_1, reads of p_1, update of p_2, update of p_1
    ..., g_2, reads of p_2, update of p_2, g_1, reads of p_1, update of p_1

So a gradient lives from where it is made to where its update stands, and no two need be alive. This comes behind Inductor's
own rewrites, which take a graph to write nothing before its end: mm and add become addmm where the add stands. That may be
behind a write into an operand of mm.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch.fx import Graph, Node

from fp8compile.fx.graph import insertion_point_after, nbytes, storage_root
from fp8compile.whole_step.joined import FIRST_UPDATE, PART

GRADIENT = "fp8compile_gradient"  # in the meta of the gradient of a parameter that is updated
WRITE = torch.ops.aten.copy_.default


def place_early(graph: Graph) -> None:
    """Move the operations of each update to where they may stand first. Left at the end: an update that reads another's."""
    updates: dict[int, list[Node]] = {}
    for node in graph.nodes:
        if (part := node.meta.get(PART, 0)) >= FIRST_UPDATE and node.op == "call_function":
            updates.setdefault(part, []).append(node)
    order = {node: at for at, node in enumerate(graph.nodes)}
    readers = _readers(graph)
    inside = {node: part for part, nodes in updates.items() for node in nodes}
    first = insertion_point_after(graph.find_nodes(op="placeholder")[-1]).prev
    spots = {part: _last_needed(nodes, readers, inside, [first], order) for part, nodes in updates.items()}
    moving = [(spot, nodes) for part, nodes in updates.items() if (spot := spots[part]) is not None]
    for spot, nodes in sorted(moving, key=lambda each: order[each[0]], reverse=True):
        for node in reversed(nodes):
            spot.append(node)
    _check(graph)


def alive_at_once(graph: Graph) -> tuple[int, int]:
    """Bytes of all gradients, and of those that are alive at one time if operations run in the order of the graph."""
    size = {root: nbytes(root.meta["val"]) for root in map(storage_root, filter(_is_gradient, graph.nodes))}
    order = {node: at for at, node in enumerate(graph.nodes)}
    last = {root: max(order[reader] for reader in found) for root, found in _readers(graph).items() if root in size}
    changes = [(order[root], size[root]) for root in size] + [(last[root] + 0.5, -size[root]) for root in size]
    alive = most = 0
    for _, change in sorted(changes):
        alive += change
        most = max(most, alive)
    return sum(size.values()), most


def _is_gradient(node: Node) -> bool:
    return bool(node.meta.get(GRADIENT))


def _readers(graph: Graph) -> dict[Node, list[Node]]:
    """By the node that a value's memory begins at, the operations that read or write it, and its views."""
    found: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        for root in {storage_root(each) for each in node.all_input_nodes}:
            found.setdefault(root, []).append(node)
    return found


def _last_needed(
    nodes: Iterable[Node],
    readers: Mapping[Node, list[Node]],
    inside: Mapping[Node, int],
    at_least: list[Node],
    order: Mapping[Node, int],
) -> Node | None:
    """The last operation that has to stand before an update; None where that is one of another update, or the output."""
    own, needed = set(nodes), set(at_least)
    for node in own:
        needed |= {each for each in node.all_input_nodes if each not in own and each.op != "placeholder"}
        if node.target is WRITE:
            written = node.args[0]
            assert isinstance(written, Node)
            needed |= {each for each in readers[storage_root(written)] if each not in own}
    if any(each in inside or each.op == "output" for each in needed):
        return None
    return max(needed, key=order.__getitem__)


def _check(graph: Graph) -> None:
    """No operation reads what an update has overwritten, and each stands behind what it reads."""
    overwritten: dict[Node, object] = {}
    seen: set[Node] = set()
    for node in graph.nodes:
        part = node.meta.get(PART, 0)
        assert seen.issuperset(node.all_input_nodes), "operations stand behind what they read"
        if node.op != "output":
            stale = [each for each in map(storage_root, node.all_input_nodes) if overwritten.get(each, part) != part]
            assert not stale, f"{node.name} reads {stale} behind the write into it"
        if node.target is WRITE and part >= FIRST_UPDATE:
            overwritten[storage_root(node.args[0])] = part
        seen.add(node)
