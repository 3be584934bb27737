"""Copies of the forward's operations in the backward, each directly before what reads it first.

Upstream's recomputation and PyTorch's memory budget put all copies where the backward begins, or leave the order to chance:
then every layer's copies are alive together (pytorch #197838). Here a copy is made as late as can be.
"""

from __future__ import annotations

import dataclasses

from torch.fx import Node

from fp8compile.fx.graph import ENCODING, ROW, Encoding, insertion_point_after
from fp8compile.fx.ops import is_view
from fp8compile.fx.partition import PartitionedGraph, SavedTensor
from fp8compile.memory.frontier import State
from fp8compile.memory.timeline import first_uses


def give_up(split: PartitionedGraph, state: State) -> None:
    """Bring the graph into a state of ``frontier``."""
    late, placed = list(split.bw.graph.nodes), first_uses(split, state.repeated)
    gone = state.given_up(split)
    given = {edge.forward: edge.backward for edge in state.kept}
    new = _new_inputs(split, state, gone, given)
    copied, encodings = given | new, dict[int, Encoding]()
    for at, nodes in sorted(placed.items()):
        with split.bw.graph.inserting_before(late[at]):
            for node in nodes:
                copied[node] = split.bw.graph.node_copy(node, copied.__getitem__)
                _mark_as_copy(copied[node], encodings)
    for edge in gone:
        if edge.backward.users:
            edge.backward.replace_all_uses_with(copied[edge.forward])
        split.replace(edge)


def _mark_as_copy(copy: Node, encodings: dict[int, Encoding]) -> None:
    """The forward's own value is the one that is observed; and a copy's codes and scale have an encoding of their own."""
    copy.meta.pop(ROW, None)
    if (encoding := copy.meta.get(ENCODING)) is not None:
        copy.meta[ENCODING] = encodings.setdefault(id(encoding), dataclasses.replace(encoding))


def _new_inputs(
    split: PartitionedGraph, state: State, gone: list[SavedTensor], given: dict[Node, Node]
) -> dict[Node, Node]:
    """Inputs of the backward for what the copies read and the caller has: parameters, data."""
    again = set(state.repeated)
    read = dict.fromkeys(n for node in state.repeated for n in node.all_input_nodes)
    missing = [n for n in read if n not in again and n not in given]
    found: dict[Node, Node] = {}
    for made in missing:
        found[made] = split.placeholder(gone[0], made)
        split.edges.insert(split.edges.index(gone[0]), SavedTensor(made, found[made], gone[0].desc))
    return found


def move_views_to_their_operand(made: Node) -> None:
    """Move the views that a saved value is, which may stand at the forward's end, to where their operand is made.

    There it is encoded then, and its memory is free for others from its last reader on.
    """
    views = []
    while is_view(made) and len(made.all_input_nodes) == 1:
        views.append(made)
        made = made.all_input_nodes[0]
    for view in reversed(views):
        after = insertion_point_after(made)
        if view is not after:
            after.prepend(view)
        made = view
