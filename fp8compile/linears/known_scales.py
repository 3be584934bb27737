"""Scales that come into a joint graph with its inputs, and statistics of the same operands that go out with its gradients.

One extra input, ``scales`` ``[rows, 4]``, holds a scale for each operand (fp8compile/linears/slot.py). Its *gradient* is the
operands' statistics of this step (numerics/delayed.py). So nothing is mutated, and autograd delivers them once a backward.
The upper half of the rows is for operands that the forward knows, the lower half for gradients.

In a graph that measures (``ScaleInput.known`` is False) each scale is the operand's own amax, as in current scaling, and the
statistics go out all the same. That is what the first step runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8compile.fx.aot import missing_gradient, return_at
from fp8compile.fx.graph import SPLICED, TAKEN_AS_CODES, insertion_point_after, splice
from fp8compile.linears.layouts import as_matrix, by_columns
from fp8compile.linears.row_blocks import ALONG_ROWS, ROW_BLOCKS, RowBlocks, in_blocks
from fp8compile.numerics import Format
from fp8compile.numerics.delayed import partial_statistics, quantize_under, total_statistics
from fp8compile.numerics.scaling import amax_tensorwise, inv_scale_of, may_be_empty
from fp8compile.recipe.context import Context, ScaleInput

aten = torch.ops.aten

INPUT, WEIGHT, GRADIENT = "input", "weight", "gradient"
OPERAND = "fp8compile_operand"  # in the meta of codes under a known scale: a ScaleRow
BALANCED = "fp8compile_balanced"  # in the meta of codes under another scale than their row's, for a merged dgrad
RETURNED = "fp8compile_operand_statistics"  # in the meta of the zeros that stand where the statistics will


@dataclass(frozen=True)
class ScaleRow:
    """One operand: its row in the scales, its format, what it is, of which module, and how its statistics are taken."""

    index: int
    format: Format
    role: str
    module: str
    blocks: RowBlocks = ALONG_ROWS


class KnownScales:
    """The rows of one joint graph. Each value and format has one, whatever matmuls read it."""

    def __init__(self, graph: Graph, scales: Node, inputs: ScaleInput) -> None:
        self.graph, self.scales, self.inputs = graph, scales, inputs
        self.rows: dict[tuple[Node, Format], tuple[ScaleRow, Node]] = {}
        self._used = [0, 0]

    @classmethod
    def of(cls, graph: Graph, ctx: Context) -> KnownScales | None:
        """Those of a graph that has the extra input, and where nobody returns a gradient of it yet."""
        if ctx.scale_input is None or (scales := ctx.input_at(graph, ctx.scale_input.position)) is None:
            return None
        return None if missing_gradient(graph, scales) is None else cls(graph, scales, ctx.scale_input)

    def row_of(self, value: Node, fmt: Format, role: str, module: str) -> tuple[ScaleRow, Node] | None:
        """The row of ``value``, and its scale ``[1, 1]``: the one known, or its own in a graph that measures; None where rows
        have run out."""
        if (value, fmt) not in self.rows:
            half, late = self.inputs.rows // 2, role == GRADIENT
            if self._used[late] == half:
                return None
            blocks = value.meta.get(ROW_BLOCKS, ALONG_ROWS) if late else ALONG_ROWS
            row = ScaleRow(self._used[late] + half * late, fmt, role, module, blocks)
            self._used[late] += 1
            inv_scale = self._known(row.index, value) if self.inputs.known else self._own(value, fmt)
            self.rows[value, fmt] = row, inv_scale
        return self.rows[value, fmt]

    def _known(self, index: int, value: Node) -> Node:
        def inv_scale(
            scales: Tensor,
        ) -> Tensor:  # [1, 1]: Inductor unsqueezes a 0-d view for _scaled_mm wrongly (2.13)
            return scales.narrow(0, index, 1).narrow(1, 0, 1)

        node: Node = splice(self.graph, inv_scale, self.scales, before=insertion_point_after(value))
        return node

    def _own(self, value: Node, fmt: Format) -> Node:
        def inv_scale(x: Tensor) -> Tensor:
            return inv_scale_of(amax_tensorwise(x), fmt).reshape(1, 1)

        node: Node = splice(self.graph, inv_scale, value, before=insertion_point_after(value))
        return node

    def promise(self) -> None:
        """Return zeros as the gradient of the scales, which measure_operands replaces once the graph is cut."""
        at = missing_gradient(self.graph, self.scales)
        if at is None or not self.rows:
            return

        def zeros(scales: Tensor) -> Tensor:
            return torch.zeros_like(scales)

        node = splice(self.graph, zeros, self.scales, before=self.graph.output_node())
        node.meta[RETURNED] = True
        return_at(self.graph, at, node)


def codes_under(
    graph: Graph,
    value: Node,
    inv_scale: Node,
    row: ScaleRow,
    width: int | None,
    lay_out: Callable[[Tensor], Tensor] = as_matrix,
    across: bool = False,
) -> Node:
    """The codes of ``value``, as a matrix of this width, under a scale; marked, so that ``encoded_in`` finds them.

    ``lay_out`` gets them as ``[..., width]``, or ``across`` as ``[width, ...]``. These are made of the transposed value,
    not of other codes: Inductor would take equal operations together and read the other codes again (torch 2.15).
    """
    blocks = value.meta.get(ROW_BLOCKS, row.blocks) if across else row.blocks
    fmt, shape = row.format, in_blocks(value, width, blocks) or _with_rows_of(value.meta["val"], width)

    def encode(x: Tensor, inv_scale: Tensor) -> Tensor:
        x = x if shape is None else x.reshape(shape)
        return lay_out(quantize_under(by_columns(x) if across else x, inv_scale, fmt))

    after = insertion_point_after(inv_scale if value < inv_scale else value)
    codes: Node = splice(graph, encode, value, inv_scale, before=after)
    codes.meta[OPERAND] = row
    value.meta[TAKEN_AS_CODES] = True
    return codes


def _with_rows_of(value: Tensor, width: int | None) -> tuple[Any, ...] | None:
    """The shape ``[..., width]`` that is nearest to a value's own, None for its own: Inductor's kernel of two kinds of sums
    takes in no operation of another shape (torch 2.13)."""
    shape = tuple(value.shape)
    if width is None or (shape[-1] == width and not may_be_empty(value.numel())):
        return None
    last = next((k for k in range(1, len(shape)) if statically_known_true(math.prod(shape[k:]) == width)), 0)
    return (*shape[:last], width) if last and not may_be_empty(value.numel()) else (-1, width)


def encoded_in(graph: Graph) -> dict[ScaleRow, tuple[Node, Node]]:
    """By row, the matrix that codes in this half of a graph were made from, and what it was multiplied by: the row's own
    scale, if codes were made under it."""
    marked = [node for node in graph.nodes if OPERAND in node.meta and node.op == "call_function"]
    own_last = sorted(reversed(marked), key=lambda node: BALANCED not in node.meta)
    return {node.meta[OPERAND]: _made_from(node) for node in own_last}


def _made_from(codes: Node) -> tuple[Node, Node]:
    """The value and the scale that ``quantize_under`` made codes from: to(where(abs(x) < inf, clamp(to(x) * scale), nan))."""
    chosen = _behind(codes, aten.where.self)
    size = _behind(chosen.args[0], aten.abs.default)
    scaled = _behind(chosen.args[1], aten.mul.Tensor)
    value, scale = size.args[0], scaled.args[1]
    while isinstance(value, Node) and SPLICED in value.meta and value.target is aten.permute.default:
        value = value.args[0]
    assert isinstance(value, Node) and isinstance(scale, Node)
    return value, scale


def _behind(node: Any, target: Any) -> Node:
    """The first of a chain of first operands, ``node`` itself included, that is an operation of this kind."""
    while node.target is not target:
        node = node.args[0]
    assert isinstance(node, Node)
    return node


def totals_of(graph: Graph, operands: Sequence[tuple[ScaleRow, Node, Node]]) -> Node:
    """``[V, 4]``: the statistics of these operands, which are sorted by ``rows_in``: those with as many rows are together."""
    widths = [value.meta["val"].shape[_dim(row, value)] for row, value, _ in operands]
    lengths = [len(list(group)) for _, group in itertools.groupby(operands, key=rows_in)]

    def totals(*parts: Tensor) -> Tensor:
        each, width = iter(zip(*[iter(parts)] * 3, strict=True)), iter(widths)
        groups = [total_statistics([next(each) for _ in range(n)], [next(width) for _ in range(n)]) for n in lengths]
        return torch.cat(groups) if len(groups) > 1 else groups[0]

    parts = [part for operand in operands for part in _partials(graph, *operand)]
    node: Node = splice(graph, totals, *parts, before=graph.output_node())
    return node


def _partials(graph: Graph, row: ScaleRow, value: Node, scale: Node) -> tuple[Node, Node, Node]:
    fmt, dim = row.format, _dim(row, value)

    def partials(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return partial_statistics(x, scale, fmt, dim)

    after = insertion_point_after(scale if value < scale else value)
    made: tuple[Node, Node, Node] = splice(graph, partials, value, scale, before=after)
    return made


def rows_in(operand: tuple[ScaleRow, Node, Node]) -> str:
    """The key by which operands are totalled together: the shape of their statistics."""
    row, value, _ = operand
    shape = [*value.meta["val"].shape]
    del shape[_dim(row, value)]
    return str(tuple(shape))


def _dim(row: ScaleRow, value: Node) -> int:
    """The dimension along which statistics are taken first: that of the rows of a block, or that of the columns."""
    shape = value.meta["val"].shape
    return -2 if row.blocks.rows and len(shape) == 3 and shape[-2] == row.blocks.rows else -1
