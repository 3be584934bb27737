"""Random generators that a graph takes and does not call. Inductor of torch 2.11 takes none without its one call.

A checkpointed attention without dropout is called without its generator's state (passes/drop_random_states.py). The input
stays, since AOTAutograd passes inputs by position. To Inductor it is one that is not there, as a gradient that is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule


def without_idle_generators(gm: GraphModule, example_inputs: Sequence[Any]) -> Sequence[Any]:
    """The example inputs of a graph, with None in the place of generators that nothing in it reads."""
    inputs = gm.graph.find_nodes(op="placeholder")
    return [
        None if isinstance(value, torch.Generator) and not node.users else value
        for node, value in zip(inputs, example_inputs, strict=True)
    ]
