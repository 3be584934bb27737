"""Sums over all columns that the gradient of logits needs, computed in chunks of rows when the backward begins.

    entropy   H = -sum of p log p, p = softmax(z), with the gradient g of H, one number a row
    gradient  dz = a - p (sum of a),  a = -g p (1 + log p)       the sum is over all columns, and g is not there before

    z_c = h[rows] W' (+ bias)     then every operation between the logits and the sums, as the graph has it, on [n, V]

The gradient itself is made in chunks of columns, none of which has a whole row; so the sums are there first. The price is one
more matmul of the head. A chunk of rows has all columns: sums of sums are made in the same chunk, and each row's are those of
the whole.

Beside the logits a sum reads values of their size that are made of numbers of rows or of columns: such a number repeated, a
comparison with a target, the gradient of a gathered entry. They are made in the chunk too.
"""

from __future__ import annotations

from collections.abc import Callable, Set

from torch.fx import Node

from fp8compile.analysis.columns import SAME_ELEMENTS, is_elementwise
from fp8compile.analysis.logit_rows import Declined, rows_of
from fp8compile.analysis.logits import Logits, descendants
from fp8compile.fx.graph import is_tensor, numel
from fp8compile.fx.ops import opname
from fp8compile.memory.chunked_columns import COMPARED, COMPARISONS, aten, keep_as_they_are
from fp8compile.memory.chunked_one_hot import one_entry_a_row
from fp8compile.memory.chunked_rows import RowChunks, layout_of, operands


class RowSums(RowChunks):
    """The sums over columns of a backward, in chunks of rows; nothing where ``logits.sums`` is empty.

    Raises:
        Declined: they are computed from what a chunk of rows does not have.
    """

    def __init__(self, logits: Logits, gradient: Set[Node]) -> None:
        self.read = []
        if not logits.sums:
            return
        self._take(logits, {logits.product}, set(logits.sums))
        self._find()
        try:
            self._collect(logits.sums)
            self._check_rows()
        except Declined as reason:
            over = opname(logits.sums[0])
            raise Declined(
                f"the gradient needs {over} over all columns of what is computed from them: {reason}"
            ) from None
        self.place = logits.sums[-1]
        ready = (o for o in self.outside if o in gradient and is_tensor(o) and numel(o.meta["val"]))
        self.ready = (next(ready),)  # the gradient of the loss

    def _find(self) -> None:
        """Follow the sums back to the logits, through values of their size and through what is made of other sums."""
        made = self.made = descendants([*self.logits.sums])
        waiting = [*self.logits.sums]
        while waiting:
            node = waiting.pop()
            for operand in operands(node) if node is not self.logits.product else ():
                if operand in self.wide or operand in self.numbers:
                    continue
                if operand in self.logits.axis or (node in self.wide and self._is_made_in_a_chunk(operand, node)):
                    self.wide.add(operand)
                elif operand in made:
                    self.numbers.add(operand)
                else:
                    continue
                waiting.append(operand)

    def _is_made_in_a_chunk(self, node: Node, reader: Node) -> bool:
        """Whether a value of the logits' size is an operation on numbers of rows and of columns."""
        if not is_tensor(node) or numel(node.meta["val"]) != self.count * self.logits.columns:
            return False
        of_columns = layout_of(node.meta["val"], reader.meta["val"].shape) != "other"  # or of a single row
        repeats = node.target in (aten.expand.default, aten.full.default, *SAME_ELEMENTS)
        known = repeats or is_elementwise(node) or one_entry_a_row(node) is not None
        return known and (node in self.made or not of_columns) and node.meta["val"].shape[-1] == self.logits.columns

    def _check_rows(self) -> None:
        """Whether the sums are of the rows that the statistics are of, each in its place."""
        axis = self.logits.axis
        rows = rows_of(self.logits.product, [n for n in self.nodes if n in axis], axis)
        if any(rows[n.args[0]] != self.logits.rows for n in self.logits.sums):  # type: ignore[index]
            raise Declined("it is of other rows than the loss reads")
        dependent = descendants([self.logits.product])
        for node in (n for n in self.nodes if n.target in COMPARISONS):
            if any(o in dependent and o.meta["val"].is_floating_point() for o in self._outside(node)):
                raise Declined(COMPARED.format(opname(node)))

    def insert_sums(self, step: int, is_kept: Callable[[Node], bool]) -> tuple[int, list[Node]]:
        """Compute the sums in chunks of ``step`` rows; returns how many chunks there are, and the sums."""
        if not self.read:
            return 0, []
        *_, h, w = self.logits.product.args
        keep_as_they_are(filter(is_kept, (h, w, *self.outside)))  # type: ignore[arg-type]
        return self.insert(step)
