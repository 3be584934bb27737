"""What is left of a card for a step's forward and backward: ``Recipe.memory_budget="fit"``.

    room = card - (weights + buffers + gradients + optimizer states)

The parts are those of ``Report.fits`` (fp8compile/reporting/memory.py), for AdamW in the parameters' dtype: two moments, and
while it steps a temporary of the size of all gradients, when activations are gone. They are read off the graph, so that the
same graph always has the same room. So the graph has to be the whole model.
"""

from __future__ import annotations

from typing import NamedTuple

from fp8compile.analysis.liveness import gradients_of_parameters
from fp8compile.fx.graph import is_tensor, nbytes
from fp8compile.fx.partition import PartitionedGraph

GIB = 1024**3
MOMENTS = 2  # of AdamW


class Room(NamedTuple):
    """Bytes: what a step holds throughout, what its optimizer needs in addition while it steps, the card."""

    held: int
    update: int
    card: int

    @property
    def left(self) -> int:
        """What forward and backward may take at their peak."""
        return self.card - self.held


def room_on(card_gib: float, split: PartitionedGraph) -> Room:
    """The room that a model's parameters, gradients and optimizer leave on a card of ``card_gib`` GiB."""
    weights = sum(nbytes(node.meta["val"]) for node in split.static if is_tensor(node))
    gradients = sum(nbytes(node.meta["val"]) for node in gradients_of_parameters(split))
    return Room(weights + (1 + MOMENTS) * gradients, gradients, int(card_gib * GIB))
