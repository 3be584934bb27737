"""Regions that the user checkpoints: what passes put into one is of that region, so its backward computes it again.

``torch.utils.checkpoint`` leaves two keys in the meta of each operation of a region: a policy and the region's number. The
min-cut knows a region by them alone. A matmul without them is one that it never repeats, so it saves what the matmul reads
or returns:

    x -> mm [region 1] -> y      an operation that stands in the place of another takes its keys (``stand_in``);
    x -> codes -> _scaled_mm     the others are of the region that reads them, or else of the one they are computed in
                                 (``join_regions``).

Readers come first: codes of a region's input are no part of the region before. An operation that is read outside of every
region stays outside. Of two regions that read it, the later one counts: for a reader in a later region the min-cut saves it.
"""

from __future__ import annotations

from collections.abc import Set

from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from fp8compile import _torch as private
from fp8compile.fx.aot import computed_from_gradients, gradients
from fp8compile.fx.graph import EXACT
from fp8compile.fx.ops import draws_random_numbers

OUTSIDE = -1  # the number of what is read outside of every region; a region's number is never negative


def region_of(node: Node) -> int | None:
    """The number of the checkpointed region that an operation is of."""
    found: int | None = node.meta.get(private.CHECKPOINT)
    return found


def has_regions(graph: Graph) -> bool:
    """Whether the user checkpoints a part of it."""
    return any(region_of(node) is not None for node in graph.nodes)


def stand_in(new: Node, node: Node) -> None:
    """Give an operation that takes another's place what the user's checkpoint says of it."""
    new.meta.update({key: node.meta[key] for key in (private.RECOMPUTE, private.CHECKPOINT) if key in node.meta})


def join_regions(graph: Graph, written: Set[Node]) -> None:
    """Let the operations that passes have added, those that are not ``written``, be of the user's checkpointed regions."""
    if all(region_of(node) is None for node in graph.nodes):
        return
    forward = _forward(graph)
    known = written | computed_from_gradients(graph)
    added = [n for n in graph.nodes if n.op == "call_function" and n not in known]
    read_in: dict[Node, frozenset[int]] = {}
    for node in reversed(added):
        if (own := region_of(node)) is None:
            found = (read_in[u] if u in read_in else _reads_in(u, forward) for u in node.users)
            read_in[node] = frozenset().union(*found)
        else:
            read_in[node] = frozenset({own})
        _join(node, read_in[node])
    for node in added:
        if not read_in[node]:
            _join(node, frozenset(own for each in node.all_input_nodes if (own := region_of(each)) is not None))


def _reads_in(reader: Node, forward: Set[Node]) -> frozenset[int]:
    """The region in which a value is read by an operation of the user's; none where only the backward reads it."""
    if (own := region_of(reader)) is not None:
        return frozenset({own})
    return frozenset({OUTSIDE} if reader in forward else ())


def _join(node: Node, regions: frozenset[int]) -> None:
    if not regions or OUTSIDE in regions or region_of(node) is not None:
        return
    if EXACT not in node.meta and not draws_random_numbers(node):
        node.meta[private.CHECKPOINT] = max(regions)
        node.meta[private.RECOMPUTE] = CheckpointPolicy.PREFER_RECOMPUTE


def _forward(graph: Graph) -> set[Node]:
    """The operations that the forward's results are computed from."""
    returned = {node for _, node in gradients(graph)}
    waiting, found = [n for n in graph.output_node().all_input_nodes if n not in returned], set[Node]()
    while waiting:
        if (node := waiting.pop()) not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found
