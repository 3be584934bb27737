"""Numbers stay as they are. Statistics of the forward's values are kept for the backward, which returns them.

observe_gradients has marked the values and numbered their lines. Each is counted where it is made; all counts go over in
one tensor of 56 bytes a line, and are added to what the backward returns anyway.
"""

from __future__ import annotations

import torch
from fp8compile.passes.observe_gradients import ALL_LINES
from torch import Tensor

from fp8compile.context import Context
from fp8compile.graph import LINE, place_after, splice
from fp8compile.numerics.histogram import statistics
from fp8compile.report import Notes
from fp8compile.split import Split


def observe_forward(split: Split, ctx: Context) -> Notes:
    """Take the statistics of every marked value of the forward and let the backward return them."""
    marked = {node.meta[LINE]: node for node in split.fw.graph.nodes if isinstance(node.meta.get(LINE), int)}
    returned = next((n for n in split.bw.graph.nodes if n.meta.get(LINE) == ALL_LINES), None)
    if not marked or returned is None:
        return Notes()
    for node in marked.values():
        del node.meta[LINE]  # so that a second run finds nothing to do
    graph = split.fw.graph
    taken = {line: splice(graph, statistics, node, before=place_after(node)) for line, node in marked.items()}

    def counts(*stats: Tensor) -> Tensor:
        by_line = dict(zip(taken, stats, strict=True))
        return torch.stack([by_line.get(i, torch.zeros_like(stats[0])) for i in range(max(by_line) + 1)])

    def with_forward(backward: Tensor, forward: Tensor) -> Tensor:
        return backward + torch.nn.functional.pad(forward, (0, 0, 0, backward.shape[0] - forward.shape[0]))

    made = splice(graph, counts, *taken.values(), before=graph.output_node())
    out = split.bw.graph.output_node()
    whole = splice(split.bw.graph, with_forward, returned, split.keep(made, "statistics"), before=out)
    out.replace_input_with(returned, whole)
    return Notes()
