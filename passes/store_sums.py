"""Numbers stay as they are but for one rounding, to a value's own dtype. Values of many tensors are stored as plain ones are.

    g = g0 + g1 + g2 + g3 + g4            a residual's gradient, from each layer behind it
    norm_backward(g, x),  g + g5          read by several kernels

Inductor stores a value that several kernels read once it takes more than ``realize_reads_threshold`` tensors to compute, and
any value once it takes more than ``realize_acc_reads_threshold``. Both are raised here (``compiler/inductor_options.py``),
since each decode takes two tensors where plain Inductor reads one. What takes no codes would then be computed again where
plain Inductor reads it: in a ResNet-50 lowered for an H200 the gradient of a stage, from seven tensors, in two kernels of 984
us together, by our model, where storing it takes 296. So such a value is stored by Inductor's own limits
(``analysis/stored_values.py``), before what casts it to a wider dtype.

Left as they are: what takes codes to compute; values that Inductor may lay out in another way than the graph says, which are
those that are not contiguous, or in a graph with convolutions not channels_last, from four dimensions on; sizes that only a
run knows; all values where the user's own options set lower limits.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Graph, Node

from fp8compile import _torch as private
from fp8compile.analysis.residuals import LAYOUT_IS_CHOSEN, behind_casts
from fp8compile.analysis.stored_values import PLAIN, in_registers, limits_in_force, steps_of
from fp8compile.fx.graph import is_static, is_tensor
from fp8compile.fx.ops import opname
from fp8compile.recipe.context import Context
from fp8compile.reporting.entries import Notes

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
CONVOLUTIONS = ("convolution", "convolution_backward")


def store_sums(graph: Graph, ctx: Context) -> Notes:
    """Let Inductor store the values without codes that it would store by its own limits."""
    if ctx.recipe.rewrites_graph:
        convolves = any(opname(node) in CONVOLUTIONS for node in graph.nodes)
        for node in _stored_by_plain_limits(graph):
            if is_tensor(node) and is_static(node) and _layout_is_known(node, convolves):
                node.meta[private.STORED] = True
    return Notes()


def _stored_by_plain_limits(graph: Graph) -> Iterator[Node]:
    """The values that are stored since they take no codes, before what casts them to a wider dtype."""
    limits = limits_in_force()
    if limits & PLAIN == limits:
        return
    steps = steps_of(graph.nodes, stored=[node for node in graph.nodes if private.STORED in node.meta])
    order = list(steps.values())
    left = in_registers(order, limits, limits) - in_registers(order, limits)
    found = (behind_casts(node, graph.output_node()) for node, step in steps.items() if step in left)
    yield from (node for node in found if node is not None)


def _layout_is_known(node: Node, convolves: bool) -> bool:
    """Whether a value lies in memory as the graph says: Inductor lays out all that convolutions read with channels last."""
    value = node.meta["val"]
    if convolves and value.ndim >= LAYOUT_IS_CHOSEN:
        return value.ndim in CHANNELS_LAST and value.is_contiguous(memory_format=CHANNELS_LAST[value.ndim])
    return bool(value.is_contiguous())
