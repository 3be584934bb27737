"""Numbers stay as they are written. A value that the forward overwrites is saved for backward as it was read.

    x.mul_(3)  ->  y = x * 3;  x.copy_(y) at the end        the backward, which takes x, would take x * 3

A functional graph writes what was changed in place (an input, a running statistic, a codebook) back into the caller's memory
at its end, or the caller of the graph does. Upstream's cut may keep that memory itself, since it is there anyway, and
recompute from it: in the backward it holds the new value. (Plain Inductor 2.13 is wrong there; tests/passes/
test_copy_overwritten.py shows it.) Here each such value is copied where it is read, and the copy is saved; recompute_kept
takes no operand from overwritten memory. The copy adds to the saved bytes, and may be stored as codes like any other value.
"""

from __future__ import annotations

from torch import Tensor

from fp8compile.fx.graph import insertion_point_after, splice, storage_root
from fp8compile.fx.partition import PartitionedGraph
from fp8compile.recipe.context import Context
from fp8compile.reporting.entries import Notes


def copy_overwritten(split: PartitionedGraph, ctx: Context) -> Notes:
    """Keep a copy of every value whose memory the forward writes to."""
    overwritten = split.overwritten
    for edge in list(split.edges):
        if edge.is_tensor and storage_root(edge.forward) in overwritten:
            split.keep_instead(
                edge, splice(split.fw.graph, as_read, edge.forward, before=insertion_point_after(edge.forward))
            )
    return Notes()


def as_read(x: Tensor) -> Tensor:
    """A copy of ``x``, laid out as it is."""
    return x.clone()
