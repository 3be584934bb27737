"""Groups: which elements of a tensor, in contiguous order, share a scale.

    row      the last dimension; where it has fewer than SHORTEST elements, the last ones that together have as many
    group    at most G elements of one row (COAT's 1 x G)

A row is what a program treats as one thing: a token, a sample, a channel of one. Its neighbour may be padding, or 300 times
as large, and masked later. An error that is a share of the neighbour's largest element would be left, so no group spans rows.
Rows of fewer than SHORTEST elements share groups: scales of their own would take more than an eighth of the bytes of codes.

A row of at most G elements is one group. A row of n G elements is n. Any other is cut into equal groups, if there is a number
of them that divides it and is at most a half above what it needs: 192 is 2 of 96, 320 is 4 of 80. Equal groups are made and
read by one loop. Else (197, 50257) groups have G elements, and the last one has what is left.

A size that only a run knows is a row by itself where it is the last, and in no row elsewhere. Nothing here guards on one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import has_static_value, statically_known_true

ALONG_ROWS = torch.__version__ >= "2.15"  # for ``_full_groups``
SHORTEST = 16
aten = torch.ops.aten
_MORE = 16  # numbers of groups that are tried at most, beyond what a row needs

Size = int | torch.SymInt


@dataclass(frozen=True)
class Groups:
    """The groups of any tensor.

    Attributes:
        most: G, the elements of a group at most.
        row_dims: how many trailing dimensions are a row; more if they have fewer than ``SHORTEST`` elements.
    """

    most: int = 128
    row_dims: int = 1

    def dims(self, shape: Sequence[Size]) -> int:
        """How many trailing dimensions of ``shape`` are a row; 0 for a scalar."""
        k = min(self.row_dims, len(shape))
        while k < len(shape) and _is_short(shape[-k:]) and is_known(shape[-k - 1]):
            k += 1
        return k

    def row(self, shape: Sequence[Size]) -> Size:
        """The elements of a row."""
        return math.prod(shape[len(shape) - self.dims(shape) :])

    def rows(self, shape: Sequence[Size]) -> Size:
        """How many rows there are."""
        return math.prod(shape[: len(shape) - self.dims(shape)])

    def size(self, row: Size) -> int:
        """The elements of each group of a row of so many elements; the last one may have fewer."""
        if not is_known(row) or row == 0:
            return self.most
        needed = -(-row // self.most)
        tried = range(needed, needed + min(-(-needed // 2), _MORE) + 1)
        return next((row // n for n in tried if row % n == 0), self.most)

    def count(self, shape: Sequence[int]) -> int:
        """How many groups a tensor of ``shape`` has."""
        row = math.prod(shape[len(shape) - self.dims(shape) :])
        return math.prod(shape[: len(shape) - self.dims(shape)]) * -(-row // self.size(row))

    def are_full(self, shape: Sequence[Size]) -> bool:
        """Whether no row ends in a short group, as far as is known."""
        row = self.row(shape)
        return statically_known_true(row % self.size(row) == 0)

    def padded(self, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """``x`` with its groups as trailing dimensions, and the indices of these; short groups are padded with zeros."""
        size = self.size(row := self.row(x.shape))
        if self.are_full(x.shape):
            return _full_groups(x, size)
        lines = torch.nn.functional.pad(x.reshape(self.rows(x.shape), row), (0, -row % size))
        return lines.reshape(lines.numel() // size, size), (-1,)

    def beside(self, x: Tensor, inv_scale_N1: Tensor) -> tuple[Tensor, Tensor]:
        """``x`` and its scales in shapes that broadcast: trailing groups, or, where tails are short, both ``[rows, row]``.

        The latter handles full groups and tails separately. Indexing by ``i // G`` over a length that G does not divide is
        shorter, but Inductor's C++ backend then splits the loop at G and drops the tail (torch 2.13, try_loop_split).
        """
        size = self.size(row := self.row(x.shape))
        if self.are_full(x.shape):
            grouped, dims = _full_groups(x, size)
            return grouped, inv_scale_N1.reshape(*grouped.shape[: -len(dims)], *[1] * len(dims))
        rows, full, tail = self.rows(x.shape), row // size, row % size
        # -1 twice, and not `full + 1` and `full:`, because the length may be symbolic: nothing proves that there are full + 1
        # groups, and Inductor reads past the end when it expands a dimension that it does not know to be 1.
        inv_scale = inv_scale_N1.reshape(rows, full + 1 if is_known(row) else -1)  # with no rows, -1 is ambiguous
        # aten's slices, since indexing asks for the device itself, which a graph that is lowered for another machine has not.
        whole, last = aten.slice.Tensor(inv_scale, 1, 0, full), aten.slice.Tensor(inv_scale, 1, -1)
        in_full_groups = whole.unsqueeze(2).expand(rows, full, size).reshape(rows, full * size)
        return x.reshape(rows, row), torch.cat([in_full_groups, last.expand(rows, tail)], 1)


def in_groups(x: Tensor, group_size: int) -> Tensor:
    """``x [..., C]`` as its groups ``[..., group_size]``, in the shape in which they are encoded; group_size divides C."""
    return _full_groups(x, group_size)[0]


def is_known(size: Size) -> TypeGuard[int]:
    """Whether a size is known when a program is traced; to Dynamo, which traces this file too, each is an int."""
    return isinstance(size, int) and has_static_value(size)


def _is_short(sizes: Sequence[Size]) -> bool:
    return all(map(is_known, sizes)) and math.prod(sizes) < SHORTEST


def _full_groups(x: Tensor, size: int) -> tuple[Tensor, tuple[int, ...]]:
    """``x`` with its groups as trailing dimensions, and these: ``[..., C / G, G]``, or ``[..., G / 64, 64]`` for heads of 64.

    ``[N, G]`` has the same order, but not x's rows. A norm along a row and the amaxes of the row's groups are one kernel only
    if the groups are a part of the row; that takes nested reductions, so torch 2.15. Before, ``[N, G]`` is as good or better:
    of ``[..., C / G, G]`` torch 2.11 makes no codes in the kernel that makes a layer's values, and torch 2.13 not where it
    counts them too (tests/sm90). Where several dimensions make up a group Inductor does not see that ``[N, G]`` and x's shape
    are views of each other, and copies the codes once more (torch 2.13, convert_to_reinterpret_view).
    """
    inner = 1
    for k in range(1, x.dim() + 1):
        there, left = x.shape[-k], size // inner
        if statically_known_true(there % left == 0):
            if k == 1 and not ALONG_ROWS:
                break
            grouped = x.reshape(*x.shape[:-k], there // left, left, *x.shape[x.dim() - k + 1 :])
            return grouped, tuple(range(-k, 0))
        if not (isinstance(there, int) and 0 < there < left and left % there == 0):
            break
        inner *= there
    return x.reshape(x.numel() // size, size), (-1,)
