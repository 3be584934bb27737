"""The gradient of logits, computed in chunks of columns, and what is made of it.

    z_c = h W'[:, c] (+ bias[c])                      the logits again, with the statistics of whole rows from the forward
    dz_c                                              every operation of the graph between the two, on the columns c
    dh = sum over chunks of dz_c W[c]                 in FP32 (numerics.chunks.matmul_unrounded), rounded once
    dW[c] = dz_c' h,  dbias[c] = sum over rows        complete: each chunk has all rows

Why columns and not rows: in chunks of rows dW [V, H] would be a sum over chunks, in FP32, read and written once for each.
The sum that chunks of columns need is dh [T, H], which is small beside it.

Whatever the shape of a wide value, the dimension of its columns is known, and only that changes. So rows may be moved in any
way: shifted, padded, reshaped.

A chunk's first matmul reads ``h`` after the results of the chunk before are there, the first chunk's after a gradient from
the loss is there (``numerics.chunks.after``). So no schedule can hold two chunks at a time, and AOTAutograd cannot put the
first chunk's logits into the forward and save them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy

from fp8compile import _torch as private
from fp8compile.analysis.columns import SAME_ELEMENTS, is_elementwise
from fp8compile.analysis.logit_rows import Declined
from fp8compile.analysis.logits import Logits, descendants
from fp8compile.fx.graph import EXACT, IN_CHUNKS, is_tensor, numel, splice, storage_root
from fp8compile.fx.ops import opname
from fp8compile.fx.tracing import stored
from fp8compile.memory.chunked_one_hot import in_columns, one_entry_a_row
from fp8compile.numerics.chunks import after, matmul_unrounded

aten = torch.ops.aten
COMPARED = "{} of them and of a number of their row: made again, they may be a bit off"
COMPARISONS = frozenset(getattr(aten, name).Tensor for name in ("eq", "ne", "lt", "le", "gt", "ge"))


class ColumnChunks:
    """The backward's part of a loss in chunks of columns.

    Raises:
        Declined: a wide value is computed from what cannot be cut into columns.
    """

    def __init__(self, logits: Logits, gradient: Set[Node]) -> None:
        self.logits, self.graph = logits, logits.product.graph
        self.axis: dict[Node, int] = {}  # what is computed in chunks
        self.dependent = descendants([logits.product])
        self.outside: dict[Node, None] = {}
        for result in logits.results:
            for operand in result.all_input_nodes:
                if operand in logits.axis:
                    self._need(operand, logits.axis[operand])
                else:
                    self.outside[operand] = None
        late = descendants(list(logits.results))
        if any(o in late for o in self.outside):
            raise Declined("their gradient is computed from what is made of it")
        ready = (o for o in self.outside if o in gradient and is_tensor(o) and numel(o.meta["val"]))
        self.ready = next(ready)  # a gradient of rows comes from outside, and there are rows

    def _need(self, node: Node, at: int) -> None:
        """Note that ``node`` is computed in chunks of its dimension ``at``, and what it is computed from."""
        if node in self.axis:
            if self.axis[node] != at:
                raise Declined(f"{opname(node)} is read by rows and by columns")
            return
        self.axis[node] = at
        if node is self.logits.product:
            self.outside |= dict.fromkeys(node.all_input_nodes)
            return
        for operand, dim in self._operands(node, at):
            if node.target in COMPARISONS and self._is_number_of_a_row(operand):
                raise Declined(COMPARED.format(opname(node)))
            if dim is None or operand.meta["val"].shape[dim] == 1 or self._is_one_row(operand):
                self.outside[operand] = None
            else:
                self._need(operand, dim)

    def _is_number_of_a_row(self, node: Node) -> bool:
        return node in self.dependent and node not in self.logits.axis and node.meta["val"].is_floating_point()

    def _is_one_row(self, node: Node) -> bool:
        return node not in self.logits.axis and numel(node.meta["val"]) == self.logits.columns

    def _operands(self, node: Node, at: int) -> list[tuple[Node, int | None]]:
        """What a wide value is computed from, and the dimension of each that stands for the columns, if any does."""
        operands, rank = node.all_input_nodes, node.meta["val"].dim()
        if not all(map(is_tensor, operands)):
            raise Declined(f"{opname(node)} depends on a symbolic size")
        if at == rank - 1 and (pair := one_entry_a_row(node)):
            return [(o, None) for o in pair]
        if is_elementwise(node) or node.target is aten.expand.default:
            dims = [(o, at - rank + o.meta["val"].dim()) for o in operands]
            return [(o, dim if dim >= 0 else None) for o, dim in dims]
        if node.target is aten.full.default:
            return []
        if node.target in (aten.slice_scatter.default, aten.slice.Tensor, aten.constant_pad_nd.default):
            if node in self.logits.axis:  # its columns are known to stay where they are
                return [(o, at) for o in operands]
        elif node.target is aten.permute.default:
            return [(operands[0], node.args[1][at] % rank)]  # type: ignore[index]
        elif node.target in SAME_ELEMENTS and at == rank - 1:
            size = operands[0].meta["val"].shape
            if len(size) and size[-1] == self.logits.columns:
                return [(operands[0], len(size) - 1)]
        raise Declined(f"their gradient is computed from {opname(node) or node.name}, a tensor of their size")

    def insert(self, step: int, is_kept: Callable[[Node], bool], first: Sequence[Node] = ()) -> int:
        """Compute the results in chunks of ``step`` columns, when ``first`` are there; returns how many chunks there are.

        What ``is_kept`` says of is taken as the forward had it, bit for bit: logits that are made again from a rounded ``h``
        would not belong to the sums of exponentials that the forward has made.
        """
        place, outside = self.logits.results[-1], list(self.outside)
        keep_as_they_are(filter(is_kept, outside))
        done, sums = [self.ready, *first], list[Node]()
        parts: list[list[Node]] = []
        dgrads = [r for r in self.logits.results if self._is_dgrad(r)]
        for start in range(0, self.logits.columns, step):
            chunk = self._chunk(slice(start, min(start + step, self.logits.columns)), outside, len(sums))
            found = splice(self.graph, chunk, *outside, *sums, *done, before=place, mark=IN_CHUNKS)
            done = list(found)
            sums, others = done[: len(dgrads)], done[len(dgrads) :]
            parts.append(others)
        for node, total in zip(dgrads, sums, strict=True):
            node.replace_all_uses_with(splice(self.graph, _rounded(node.meta["val"].dtype), total, before=place))
        for node, of in zip(
            (r for r in self.logits.results if r not in dgrads), zip(*parts, strict=True), strict=True
        ):
            node.replace_all_uses_with(splice(self.graph, _joined(self._axis_of(node)), *of, before=place))
        return len(parts)

    def _is_dgrad(self, result: Node) -> bool:
        return result.target is aten.mm.default and self.logits.axis.get(result.args[0]) == 1  # type: ignore[arg-type]

    def _axis_of(self, result: Node) -> int:
        """The dimension of the columns in a result that has them."""
        if result.target is aten.mm.default:
            return 0 if result.args[0] in self.logits.axis else 1
        operand, dims = result.args[:2]
        at, rank = self.logits.axis[operand], operand.meta["val"].dim()  # type: ignore[index,union-attr]
        kept = len(result.args) > 2 and result.args[2]
        return at if kept else at - sum(d % rank < at for d in dims)  # type: ignore[union-attr]

    def _chunk(self, columns: slice, outside: list[Node], summed: int) -> Any:
        """A function that computes the results of some columns; sums over chunks first."""
        order = [n for n in self.graph.nodes if n in self.axis]

        def logits_in_columns(*values: Tensor) -> tuple[Tensor, ...]:
            given = dict(zip(outside, values, strict=False))
            sums, done = values[len(outside) :][:summed], values[len(outside) + summed :]
            found: dict[Node, Tensor] = {}
            for node in order:
                found[node] = self._computed(node, found, given, columns, done)
            totals, others = list[Tensor](), list[Tensor]()
            for result in self.logits.results:
                if self._is_dgrad(result):
                    left, right = result.all_input_nodes
                    w = given[right].narrow(0, columns.start, columns.stop - columns.start)
                    part = matmul_unrounded(found[left], w)
                    totals.append(stored(sums[len(totals)] + part) if sums else stored(part))
                else:
                    args = torch.fx.node.map_arg(result.args, lambda n: found[n] if n in found else given[n])
                    others.append(result.target(*args, **result.kwargs))  # type: ignore[operator]
            return (*totals, *others)

        return logits_in_columns

    def _computed(
        self,
        node: Node,
        found: Mapping[Node, Tensor],
        given: Mapping[Node, Tensor],
        columns: slice,
        done: tuple[Tensor, ...],
    ) -> Any:
        at = self.axis[node]
        shape = list(node.meta["val"].shape)
        shape[at] = count = columns.stop - columns.start
        if node is self.logits.product:
            *bias, h, w = (given[o] for o in node.args)  # type: ignore[index]
            bias = [b.narrow(-1, columns.start, count) for b in bias]
            return node.target(*bias, after(h, *done), w.narrow(1, columns.start, count))  # type: ignore[operator]
        if node.target is aten.full.default:
            return aten.full.default(shape, *node.args[1:], **node.kwargs)
        if pair := one_entry_a_row(node):
            return in_columns(range(columns.start, columns.stop), *(given[o] for o in pair))
        dims = dict(self._operands(node, at))

        def operand(o: Node) -> Tensor:
            if o in found:
                return found[o]
            dim = dims[o]
            whole = dim is None or given[o].shape[dim] == 1
            return given[o] if whole else given[o].narrow(dim, columns.start, count)  # type: ignore[arg-type]

        mapped: Any = torch.fx.node.map_arg((node.args, node.kwargs), operand)
        args, kwargs = mapped
        if node.target in (aten.expand.default, *SAME_ELEMENTS):
            x = args[0]
            return x.expand(shape) if node.target is aten.expand.default else x.reshape(shape)
        return node.target(*args, **kwargs)  # type: ignore[operator]


def keep_as_they_are(nodes: Iterable[Node]) -> None:
    """Have values of the forward saved, and not as codes."""
    for root in map(storage_root, nodes):  # the cut saves no views
        root.meta[EXACT] = True
        if root.op != "placeholder":
            root.meta[private.RECOMPUTE] = CheckpointPolicy.MUST_SAVE


def _rounded(dtype: torch.dtype) -> Any:
    def of_all_columns(total: Tensor) -> Tensor:
        return total.to(dtype)

    return of_all_columns


def _joined(at: int) -> Any:
    def of_all_columns(*parts: Tensor) -> Tensor:
        return torch.cat(parts, at)

    return of_all_columns
