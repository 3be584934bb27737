"""Gradients that are summed into a bias, taken in blocks of R rows: as ``[rows / R, R, C]``.

The sum of a bias gradient goes down columns. With amaxes along rows beside it a kernel takes one row at a time, and such a
kernel lays no codes out by columns (fp8compile/compiler/row_kernels.py): others make the gradient again, or read its codes
again. An amax is a maximum and a count is a sum of ones, so any partition of a tensor gives the same totals. Taken down
blocks of rows, as the first half of the bias gradient's sum is, they are one kernel of tiles with it and with both layouts:

    d                                      [rows / R, R, C]
    codes of d                             the same, and [C, rows / R, R]
    sum(d, 1), amax(|d|, 1), two counts    [rows / R, C], FP32

Codes by columns of an input that is computed from what such a gradient is computed from (an activation) are laid out in the
same blocks, since one kernel has one shape.

Along rows as before, on a GPU for a reason that the report has: values that depend on sums of their own rows (the backward
of a norm), which are a kernel along rows anyway; values that something else sums too; small values; rows that no block
divides; sizes that are symbols.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fp8compile.fx.graph import is_static, is_tensor
from fp8compile.fx.ops import computed_from, is_pointwise, is_reduction, is_view, readers

aten = torch.ops.aten

ROW_BLOCKS = "fp8compile_row_blocks"  # in the meta of a value: how its rows are taken, a RowBlocks
# Rows of a block, the most first. What is left of a column of R of them is four FP32 numbers, stored and read: 16 / R of a
# 16-bit gradient's bytes. With 16 it would be what codes cost that are read and stored anew.
BLOCKS = (512, 256, 128, 64, 32)
# Columns of blocks. With fewer than 64 for each multiprocessor (B200: 148) Inductor cuts their sums in two (torch 2.13).
LEAST_COLUMNS = 64 * 148
LEAST_NUMEL = 1 << 20  # with fewer elements, what was just written is still in the L2 cache

SYMBOLIC = "its size is known only when the graph runs"
SMALL = "it is small"
OWN_SUMS = "it depends on sums of its own rows"
OTHER_SUMS = "it is reduced in other ways too"


@dataclass(frozen=True)
class RowBlocks:
    """How the rows of a value are taken: in blocks of so many, or one by one (0), and why so where blocks could have been."""

    rows: int = 0
    reason: str = ""

    def __str__(self) -> str:
        reason = f": {self.reason}" if self.reason else ""
        return f"down blocks of {self.rows} rows" if self.rows else f"along rows{reason}"


ALONG_ROWS = RowBlocks()


def take_in_blocks(gradients: Mapping[Node, int | None], inputs: Mapping[Node, int | None]) -> None:
    """Mark the gradients that are taken in blocks, and inputs that are computed beside them. Each is a matrix of some width,
    None for its own."""
    read = set[Node]()
    for value, width in gradients.items():
        if (sums := list(filter(is_reduction, readers(value)))) and _is_on_gpu(value):
            value.meta[ROW_BLOCKS] = found = _judged(value, width, sums)
            read |= operands_in_memory(value) if found.rows else set()
    for value, width in inputs.items():
        if _is_on_gpu(value) and is_pointwise(value) and operands_in_memory(value) & read:
            value.meta[ROW_BLOCKS] = _blocks_of(value, width)


def in_blocks(value: Node, width: int | None, blocks: RowBlocks) -> tuple[int, int, int] | None:
    """The shape ``[rows / R, R, width]`` of a value, a matrix of this width; None where its rows are taken one by one."""
    shape = value.meta["val"].shape
    columns = width or shape[-1]
    if not blocks.rows or not is_static(value) or shape.numel() % (blocks.rows * columns):
        return None
    return shape.numel() // (blocks.rows * columns), blocks.rows, columns


def operands_in_memory(made: Node) -> set[Node]:
    """The tensors that a value is computed from and that have as many elements as it."""
    size = made.meta["val"].numel()
    found = (n for n in computed_from(made) if not (is_pointwise(n) or is_view(n)) and is_tensor(n))
    return {n for n in found if is_static(n) and n.meta["val"].numel() == size}


def sums_over_rows(node: Node, columns: int) -> bool:
    """Whether a reduction is the sum over all rows of a matrix of so many columns."""
    seen = node.args[0].meta["val"] if isinstance(node.args[0], Node) else None
    if node.target is not aten.sum.dim_IntList or seen is None or seen.shape[-1] != columns:
        return False
    dims: Any = node.args[1]  # None: all of them
    return dims is not None and sorted(d % seen.ndim for d in dims) == list(range(seen.ndim - 1))


def _is_on_gpu(value: Node) -> bool:
    return bool(value.meta["val"].device.type == "cuda")


def _judged(value: Node, width: int | None, sums: list[Node]) -> RowBlocks:
    """How the rows of a gradient are taken, of which these are all reductions."""
    columns = width or value.meta["val"].shape[-1]
    over_rows = [each for each in sums if sums_over_rows(each, columns)]
    if not over_rows:
        return ALONG_ROWS  # no bias
    return _blocks_of(value, width) if len(over_rows) == len(sums) else RowBlocks(reason=OTHER_SUMS)


def _blocks_of(value: Node, width: int | None) -> RowBlocks:
    """Blocks of the rows of a value, if the kernel that makes it can take them."""
    if not is_static(value):
        return RowBlocks(reason=SYMBOLIC)
    numel = value.meta["val"].numel()
    if numel < LEAST_NUMEL:
        return RowBlocks(reason=SMALL)
    if any(map(is_reduction, computed_from(value))):
        return RowBlocks(reason=OWN_SUMS)
    found = (each for each in map(RowBlocks, BLOCKS) if numel >= each.rows * LEAST_COLUMNS)
    rows = numel // (width or value.meta["val"].shape[-1])
    none = RowBlocks(reason=f"no block of {BLOCKS[-1]} rows or more divides {rows:,}")
    return next((each for each in found if in_blocks(value, width, each)), none)
