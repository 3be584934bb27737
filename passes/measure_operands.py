"""Numbers stay as they are. The amaxes of operands under known scales leave the graph as the gradient of these scales.

quantize_linears has marked the codes, and returned zeros. Once the graph is cut, each half holds the operands that it
encodes. Beside each operand's codes stand its statistics: amax, elements clipped, elements not finite
(numerics/delayed.py). Those of the forward are saved for backward, 16 bytes an operand. Before the cut they could not be told
to be the forward's: nothing in the forward needs them, so the min-cut would take them in the backward, from tensors that are
read once more.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor
from torch.fx import Graph, Node

from fp8compile.fx.graph import SAVED_AS_CODES, insertion_point_after, splice
from fp8compile.fx.ops import computed_from, is_reduction
from fp8compile.fx.partition import PartitionedGraph
from fp8compile.fx.provenance import Origin, TensorInfo, op_name, source_line
from fp8compile.linears.known_scales import RETURNED, ScaleRow, encoded_in, rows_in, totals_of
from fp8compile.numerics.delayed import placed
from fp8compile.numerics.groups import in_groups
from fp8compile.recipe.context import Context
from fp8compile.reporting.entries import Notes, Operand


def measure_operands(split: PartitionedGraph, ctx: Context) -> Notes:
    """Take the statistics of every operand under a known scale, and let the backward return them."""
    zeros = next((n for n in split.bw.graph.nodes if n.meta.get(RETURNED)), None)
    if zeros is None or ctx.scale_input is None:
        return Notes()
    half = ctx.scale_input.rows // 2
    taken, operands, made_of = dict[bool, Node](), list[Operand](), dict[ScaleRow, Node]()
    for late, module in ((False, split.fw), (True, split.bw)):
        encoded = {row: each for row, each in encoded_in(module.graph).items() if row not in made_of}
        made_of |= {row: value for row, (value, _) in encoded.items()}
        own = [
            (row, value if row.blocks.rows else _in_groups(module.graph, value, ctx), scale)
            for row, (value, scale) in encoded.items()
        ]
        if own:
            order = {row: i for i, row in enumerate(sorted(encoded, key=made_of.__getitem__))}
            own.sort(key=lambda operand: (rows_in(operand), operand[0].index))
            totals = totals_of(module.graph, own)
            taken[late] = totals if late else split.keep(totals, "operand_statistics")
            operands += [_entry(row, made_of[row], late * half + i, order[row]) for i, (row, *_) in enumerate(own)]
    lates = list(taken)

    def gradient(*taken: Tensor) -> Tensor:
        return placed(taken, lates, half)

    out = split.bw.graph.output_node()
    out.replace_input_with(zeros, splice(split.bw.graph, gradient, *taken.values(), before=out))
    return Notes(operands=tuple(operands))


def _in_groups(graph: Graph, value: Node, ctx: Context) -> Node:
    """``value`` in the groups in which what it is made from is stored, so that one kernel can take both amaxes; a value that
    depends on sums of its rows as it is, since its kernel walks along rows."""
    behind, width, size = list(computed_from(value)), value.meta["val"].shape[-1], ctx.recipe.saved.group_size
    stored = any(SAVED_AS_CODES in node.meta for node in behind) and not any(map(is_reduction, behind))
    if not (stored and isinstance(width, int) and width % size == 0):
        return value

    def groups(x: Tensor) -> Tensor:
        return in_groups(x, size)

    node: Node = splice(graph, groups, value, before=insertion_point_after(value))
    return node


def _entry(row: ScaleRow, value: Node, place: int, order: int) -> Operand:
    where = Origin(op_name(value), row.module, source_line(value))
    info = dataclasses.replace(TensorInfo.of(value), origin=where)
    return Operand(info, row.role, row.format.name, row.index, place, str(row.blocks), order)
