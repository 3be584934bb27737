"""What is left of a card for a step's forward and backward: ``Recipe.memory.budget="fit"``.

    forward and backward    card - (weights + buffers + optimizer states); gradients are made in it, and count in its peak
    the optimizer's step    what is left of that has to hold all gradients, and a temporary of the same size

The parts are those of ``Report.fits`` (fp8compile/reporting/memory.py), for AdamW in the parameters' dtype: two moments. The
temporary exists while it steps, when activations are gone. They are read off the graph, so that the same graph always has the
same room. So the graph has to be the whole model.
"""

from __future__ import annotations

from typing import NamedTuple

from fp8compile.analysis.liveness import gradients_of_parameters
from fp8compile.fx.graph import is_tensor, nbytes
from fp8compile.fx.partition import PartitionedGraph

GIB = 1024**3
MOMENTS = 2  # of AdamW


class Room(NamedTuple):
    """Bytes: what is held throughout, what gradients and the optimizer's step take in addition, the card."""

    held: int
    update: int
    card: int

    @property
    def left(self) -> int:
        """What forward and backward may take at their peak, gradients of parameters among it."""
        return self.card - self.held


def room_on(card_gib: float, split: PartitionedGraph) -> Room:
    """The room that a model's parameters, gradients and optimizer leave on a card of ``memory.card_gib`` GiB."""
    weights = sum(nbytes(node.meta["val"]) for node in split.static if is_tensor(node))
    gradients = sum(nbytes(node.meta["val"]) for node in gradients_of_parameters(split))
    return Room(weights + MOMENTS * gradients, 2 * gradients, int(card_gib * GIB))
