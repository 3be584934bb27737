"""Numbers of logits' rows, computed from chunks of rows: the forward's statistics, or a backward's sums (``sums``).

    z_c = h[rows] W' (+ bias)      then every operation between the logits and the statistics, as the graph has it, on [n, V]

Within a chunk every value has one of four layouts, whatever its shape in the graph: wide ``[n, V]``, one number a row
``[n, 1]``, one a column ``[1, V]``, one number ``[]``. The operations are element by element or reduce a row, so each row's
statistics are computed from the same numbers in the same way as without chunks.

A chunk's matmul reads its rows of ``h`` after the statistics of the chunk before are stored (``numerics.chunks.after``). So
no schedule can hold two chunks' logits at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fp8compile.analysis.columns import SAME_ELEMENTS, is_elementwise
from fp8compile.analysis.logit_rows import Declined, LogitRows
from fp8compile.analysis.logits import OF_ONE_DIMENSION, Logits
from fp8compile.fx.checkpointed import stand_in
from fp8compile.fx.graph import IN_CHUNKS, is_tensor, splice
from fp8compile.fx.ops import opname
from fp8compile.fx.tracing import stored
from fp8compile.memory.chunked_one_hot import in_columns, one_entry_a_row
from fp8compile.numerics.chunks import after

aten = torch.ops.aten


class RowChunks:
    """The forward's part of a loss in chunks of rows.

    Raises:
        Declined: a value has a layout that is none of the four, or the statistics are read before they are complete.
    """

    def __init__(self, logits: Logits) -> None:
        statistics = logits.statistics
        self._take(logits, set(logits.axis), set(statistics))
        self._collect([n for n in statistics if any(user not in self.numbers for user in n.users)])

    def _take(self, logits: Logits, wide: set[Node], numbers: set[Node]) -> None:
        """What may be computed in chunks: ``wide`` values, and ``numbers`` of rows."""
        self.logits, self.graph = logits, logits.product.graph
        self.wide, self.numbers = wide, numbers
        reduced: Any = next(n.args[0] for n in logits.statistics if n.args[0] in logits.axis)
        self.count = math.prod(reduced.meta["val"].shape[:-1])
        self.place = logits.statistics[-1]  # chunks stand before it
        self.ready: tuple[Node, ...] = ()  # what the first chunk waits for

    def _collect(self, read: Sequence[Node]) -> None:
        """Find what the numbers that are ``read`` are computed from, back to the logits, and whether chunks can hold it."""
        self.read = [*read]
        found, waiting = set[Node](), [*read]
        while waiting:
            node = waiting.pop()
            if node not in found and (node in self.wide or node in self.numbers):
                found.add(node)
                waiting += operands(node)
        self.nodes, self.inside = [n for n in self.graph.nodes if n in found], found
        self.outside = list(dict.fromkeys(o for n in self.nodes for o in self._outside(n)))
        complete = {n for n in self.nodes if n in self.wide and _count(n, 1) == self.count}
        for node in self.nodes:
            self._check(node, complete)

    def _outside(self, node: Node) -> list[Node]:
        if node is self.logits.product:
            return []
        return [o for o in operands(node) if o not in self.inside]

    def _check(self, node: Node, complete: set[Node]) -> None:
        """Whether a value has one of the layouts, and its operands too."""
        if node is self.logits.product:
            return
        if node in self.wide:
            layouts = {layout_of(o.meta["val"], node.meta["val"].shape) for o in self._outside(node)}
            broadcasts = is_elementwise(node) or node.target is aten.expand.default
            of_rows = (o for o in operands(node) if broadcasts and o in self.inside and o not in self.wide)
            if not all(_is_one_a_row(o.meta["val"].shape, node.meta["val"].shape) for o in of_rows):
                raise Declined(f"{opname(node)} reads one number a row as one a column")
            if "other" in layouts or ("rows" in layouts and node not in complete):
                raise Declined(f"{opname(node)} reads a tensor of the logits' size beside them")
        elif node.args[0] in self.wide:
            index = node.args[2] if node.target is aten.gather.default else None
            if isinstance(index, Node) and _count(index, 0) != self.count:
                raise Declined("gather reads some of the logits' rows")
        elif (
            not (is_elementwise(node) or node.target in SAME_ELEMENTS)
            or _count(node, 0) != self.count
            or any(layout_of(o.meta["val"], (*node.meta["val"].shape, 1)) == "other" for o in self._outside(node))
        ):
            raise Declined(f"{opname(node)} makes one value of all rows, which the rest of the loss reads")

    def insert(self, step: int) -> tuple[int, list[Node]]:
        """Compute the numbers that are read in chunks of ``step`` rows; returns how many there are, and the numbers."""
        graph, product = self.graph, self.logits.product
        *bias, h, w = product.args
        place, done = self.place, self.ready
        if self.logits.rows.slices:
            h = splice(graph, _rows_of(self.logits.rows), h, before=place)  # type: ignore[arg-type]
        parts: list[Sequence[Node]] = []
        for start in range(0, self.count, step):
            chunk = self._chunk(slice(start, min(start + step, self.count)), len(bias))
            operands = [*bias, h, w, *self.outside, *done]
            done = splice(graph, chunk, *operands, before=place, mark=IN_CHUNKS)  # type: ignore[arg-type]
            parts.append(done)
        joined: list[Node] = []
        for node, of in zip(self.read, zip(*parts, strict=True), strict=True):
            joined += [whole := splice(graph, _joined(tuple(node.meta["val"].shape)), *of, before=place)]
            stand_in(whole, node)
            node.replace_all_uses_with(whole, delete_user_cb=lambda user: user not in self.logits.statistics)
        return len(parts), joined

    def _chunk(self, rows: slice, biases: int) -> Any:
        """A function that computes the numbers of some rows."""

        def logits_in_rows(*values: Tensor) -> tuple[Tensor, ...]:
            bias, (h, w) = values[:biases], values[biases : biases + 2]
            others = values[biases + 2 :]
            outside = dict(zip(self.outside, others[: len(self.outside)], strict=True))
            own = after(_rows(h, rows), *others[len(self.outside) :])
            found: dict[Node, Tensor] = {}
            for node in self.nodes:
                if node is self.logits.product:
                    found[node] = node.target(*bias, own, w)  # type: ignore[operator]
                else:
                    found[node] = self._computed(node, found, outside, rows)
            return tuple(stored(found[node]) for node in self.read)

        return logits_in_rows

    def _computed(self, node: Node, found: Mapping[Node, Tensor], outside: Mapping[Node, Tensor], rows: slice) -> Any:
        if node.target in SAME_ELEMENTS or node.target is aten.slice.Tensor:
            return found[node.args[0]]  # type: ignore[index]
        is_wide = node in self.wide
        if not is_wide and node.args[0] in self.wide:
            x = found[node.args[0]]  # type: ignore[index]
            if node.target is aten.gather.default:
                at: Any = node.args[2]  # made of the logits, or not
                index = found[at] if at in found else _rows(outside[at].reshape(-1, 1), rows)
                return aten.gather.default(x, 1, index)
            dim: Any = 1 if node.target in OF_ONE_DIMENSION else [1]
            return node.target(x, dim, True, **node.kwargs)  # type: ignore[operator]
        shape = node.meta["val"].shape if is_wide else (*node.meta["val"].shape, 1)

        def operand(o: Node) -> Tensor:
            return found[o] if o in found else _laid_out(outside[o], shape, rows)

        if pair := one_entry_a_row(node):
            return in_columns(range(shape[-1]), *map(operand, pair))
        if node.target is aten.full.default:
            return aten.full.default([rows.stop - rows.start, shape[-1]], *node.args[1:], **node.kwargs)
        if node.target is aten.expand.default:
            return operand(node.all_input_nodes[0]).expand(rows.stop - rows.start, shape[-1])
        mapped: Any = torch.fx.node.map_arg((node.args, node.kwargs), operand)
        args, kwargs = mapped
        return node.target(*args, **kwargs)  # type: ignore[operator]


def operands(node: Node) -> list[Node]:
    """What a value is computed from; of a gathered entry's gradient without the zeros."""
    return [*(one_entry_a_row(node) or node.all_input_nodes)]


def _count(node: Node, columns: int) -> int:
    """The elements of a value, without its last ``columns`` dimensions."""
    shape = node.meta["val"].shape
    return math.prod(shape[: len(shape) - columns]) if is_tensor(node) else -1


def _is_one_a_row(shape: Sequence[int], wide: Sequence[int]) -> bool:
    """Whether broadcasting to ``wide``, ``[..., V]``, repeats a value along its columns alone."""
    return [1] * (len(wide) - len(shape)) + [*shape] == [*wide[:-1], 1]


def layout_of(value: Any, shape: Sequence[int]) -> str:
    """How a value is broadcast to a shape ``[..., V]`` or ``[..., 1]``: "one", "rows", "columns", or "other"."""
    if not isinstance(value, Tensor):
        return "other"
    of_statistic = shape[-1] == 1 and value.dim() < len(shape)  # its own dimensions are rows
    sizes = [*value.shape, 1] if of_statistic else [*value.shape]
    if math.prod(sizes) == 1:
        return "one"
    if sizes[-1] == 1:
        return "rows"
    return "columns" if math.prod(sizes[:-1]) == 1 and sizes[-1] == shape[-1] else "other"


def _laid_out(x: Tensor, shape: Sequence[int], rows: slice) -> Tensor:
    """A value from outside in the layout of a chunk of these rows."""
    layout = layout_of(x, shape)
    if layout == "one":
        return x.reshape(())
    if layout == "columns":
        return x.reshape(1, -1)
    if shape[-1] == 1 and x.dim() < len(shape):
        x = x.unsqueeze(-1)
    return _rows(x.expand(*shape[:-1], 1).reshape(-1, 1), rows)


def _rows(x: Tensor, rows: slice) -> Tensor:
    return x.narrow(0, rows.start, rows.stop - rows.start)


def _rows_of(rows: LogitRows) -> Any:
    def rows_that_the_loss_reads(h: Tensor) -> Tensor:
        return rows.of(h)

    return rows_that_the_loss_reads


def _joined(shape: tuple[int, ...]) -> Any:
    def of_all_rows(*parts: Tensor) -> Tensor:
        return torch.cat(parts).reshape(shape)

    return of_all_rows
