"""Which rows of the logits a value holds: all, or slices of slices of them; and why it cannot be said.

    z [B, S, V] -> z[:, :-1] -> z[:, -K:]      rows of h [B, S, H]: h[:, :-1][:, -K:]

A loss of shifted rows needs no other logits than those of its rows, so these are all that chunks compute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from fp8compile.analysis.columns import SAME_ELEMENTS, is_elementwise
from fp8compile.fx.graph import numel
from fp8compile.fx.ops import opname

aten = torch.ops.aten


class Declined(Exception):
    """Why logits must exist as a whole."""


@dataclass(frozen=True)
class LogitRows:
    """Which of the logits' rows a value holds: slices of them, each as (leading sizes, dimension, start, end, step)."""

    slices: tuple[tuple[tuple[int, ...], int, int, int, int], ...] = ()

    def of(self, h: torch.Tensor) -> torch.Tensor:
        """The same rows of ``h`` ``[T, H]``, as ``[N, H]``."""
        for sizes, dim, start, end, step in self.slices:
            h = torch.ops.aten.slice.Tensor(h.reshape(*sizes, h.shape[-1]), dim, start, end, step)
        return h.reshape(-1, h.shape[-1])


def rows_of(product: Node, wide: Sequence[Node], axis: Mapping[Node, int]) -> dict[Node, LogitRows]:
    """Of each of these wide values, the product before them, which rows of the logits it holds.

    Raises:
        Declined: one holds them in another order.
    """
    rows = {product: LogitRows()}
    for node in wide:
        if node is product:
            continue
        operands = [o for o in node.all_input_nodes if o in axis]
        if axis[node] != node.meta["val"].dim() - 1 or len({rows[o] for o in operands}) > 1:
            raise Declined(f"{opname(node)} moves the logits' rows")
        rows[node] = before = rows[operands[0]]
        if node.target is aten.slice.Tensor:
            args: tuple[object, ...] = (*node.args, *(0, 0, None, None, 1)[len(node.args) :])
            sizes = tuple(operands[0].meta["val"].shape[:-1])
            rows[node] = LogitRows((*before.slices, (sizes, *args[1:])))  # type: ignore[arg-type]
        elif not (is_elementwise(node) or node.target in SAME_ELEMENTS) or _grows(node, operands[0]):
            raise Declined(f"{opname(node)} moves the logits' rows")
    return rows


def _grows(node: Node, operand: Node) -> bool:
    """Whether a value has other rows than what it is computed from: repeated ones."""
    return bool(numel(node.meta["val"]) != numel(operand.meta["val"]))
