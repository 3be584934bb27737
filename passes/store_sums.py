"""Numbers stay as they are but for one rounding, to a value's own dtype. Values of many tensors are stored as plain ones are.

    g = g0 + g1 + g2 + g3 + g4            a residual's gradient, from each layer behind it
    sum(g * x, 0),  g + g5                read by several kernels

Inductor stores a value that is read several times once it takes more than ``realize_reads_threshold`` tensors to compute.
That is raised here (``compiler/inductor_options.py``), since each decode takes two tensors where plain Inductor reads one.
What takes no codes would then be computed again where plain Inductor reads it: in a ResNet-50 lowered for an H200 the
gradient of a stage, from seven tensors, in two kernels of 984 us together, by our model, where storing it takes 296. So such
a value is stored by Inductor's own limit (``analysis/stored_values.py``), before what casts it to a wider dtype.

Left as they are: what takes codes to compute; what one kernel along rows reads, as the backward of a frozen norm does, where
plain Inductor stores it too; values that Inductor may lay out in another way than the graph says, which are those that are
not contiguous, or in a graph with convolutions not channels_last, from four dimensions on; sizes that only a run knows; all
values where the user's own options set lower limits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from operator import or_

from torch.fx import Graph, Node

from fp8compile import _torch as private
from fp8compile.analysis.residuals import LAYOUT_IS_CHOSEN, behind_casts
from fp8compile.analysis.stored_values import in_registers, limits_in_force, steps_of
from fp8compile.cost.op_cost import CONVOLUTION, ITS_BACKWARD
from fp8compile.fx.graph import is_static, is_tensor
from fp8compile.fx.ops import argument_of, is_generated, is_reduction, is_view_or_part, opname
from fp8compile.numerics.states.channels_last import in_memory_order
from fp8compile.recipe.context import Context
from fp8compile.reporting.entries import Notes


def store_sums(graph: Graph, ctx: Context) -> Notes:
    """Let Inductor store the values without codes that it would store by its own limit."""
    if ctx.recipe.rewrites_graph:
        convolves = any(opname(node) in (CONVOLUTION, ITS_BACKWARD) for node in graph.nodes)
        for node in _stored_by_plain_limits(graph):
            if is_tensor(node) and is_static(node) and _layout_is_known(node, convolves):
                node.meta[private.STORED] = True
    return Notes()


def _stored_by_plain_limits(graph: Graph) -> Iterator[Node]:
    """The values that are stored since they take no codes, before what casts them to a wider dtype."""
    limits = limits_in_force()
    steps = steps_of(graph.nodes, stored=[node for node in graph.nodes if private.STORED in node.meta])
    order = list(steps.values())
    left = in_registers(order, limits, limits.few) - in_registers(order, limits)
    apart = _read_apart(graph, [node for node, step in steps.items() if step in left])
    found = (behind_casts(node, graph.output_node()) for node in apart)
    yield from (node for node in found if node is not None)


def _read_apart(graph: Graph, values: Sequence[Node]) -> list[Node]:
    """Of ``values``, those that no single kernel can read: one of its readers sums across rows, or waits for a matmul that
    another one feeds. Sets of values are bits of integers."""
    bit = {node: 1 << at for at, node in enumerate(values)}
    itself: dict[Node, int] = {}  # which values a node is, or is a view of
    near: dict[Node, int] = {}  # which it is computed from in the same kernel, if that goes along rows
    beyond: dict[Node, int] = {}  # which it waits for through a matmul
    apart = 0
    for node in graph.nodes:
        read = node.all_input_nodes
        of, computed, waits = (reduce(or_, (each[r] for r in read), 0) for each in (itself, near, beyond))
        apart |= of & waits
        if is_reduction(node) and not _is_along_rows(node):
            apart |= computed
        fused = is_generated(node) or is_view_or_part(node)
        itself[node] = bit.get(node, 0) | (of if is_view_or_part(node) else 0)
        near[node] = bit.get(node, 0) | (computed if fused else 0)
        beyond[node] = waits if fused else waits | computed
    return [node for node in values if bit[node] & apart]


def _is_along_rows(reduction: Node) -> bool:
    """Whether an operation reduces the last dimension alone."""
    read, dims = reduction.all_input_nodes[0], argument_of(reduction, "dim")
    dims = [dims] if isinstance(dims, int) else dims
    return bool(dims) and is_tensor(read) and {*dims} <= {-1, read.meta["val"].ndim - 1}


def _layout_is_known(node: Node, convolves: bool) -> bool:
    """Whether a value lies in memory as the graph says: Inductor lays out all that convolutions read with channels last."""
    value = node.meta["val"]
    if convolves and value.ndim >= LAYOUT_IS_CHOSEN:
        return value.ndim in (4, 5) and bool(in_memory_order(value).is_contiguous())
    return bool(value.is_contiguous())
