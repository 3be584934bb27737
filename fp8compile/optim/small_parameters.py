"""Small parameters whose rows are not whole groups: pieces that share one kernel, whatever their shapes.

    short rows [R, n]                     rows 0, 2, 4 ... and rows 1, 3, 5 ...          n < 128, contiguous
    rows that end in a short group        a piece for each column of groups              [R, 128] ..., [R, tail]

Each piece is [rows, width], with a stride of its own, no multiple of anything, and aligned to nothing. Its kernel holds 128
elements of a row whatever the width, and loads them one by one. It is slow, but a kind of kernel takes seconds to compile.
What is large, or many, has kinds of its own. Every other row is a piece because code for rows side by side fits no others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor

from fp8compile.numerics.states.four_bit import Packed
from fp8compile.numerics.states.interface import GROUP, rows_of
from fp8compile.numerics.states.packing import Planar
from fp8compile.optim.plan import UpdatePlan
from fp8compile.optim.row_views import LARGE, View, columns_of, pieces

# Of all of them together, 128 to a row of a piece: by estimate a fifth of a millisecond, at 300 instructions each.
SLOTS = 2**23
Pieces = list[tuple[UpdatePlan, View]]


def pieces_of_all(several: Iterable[tuple[UpdatePlan, Tensor]]) -> list[Pieces]:
    """For each parameter the pieces in which it is updated: shared ones of small ones, unless there are many."""
    several = [*several]
    shared = [_shared(plan, p) for plan, p in several]
    rows = sum(len(view(p)) for (_, p), found in zip(several, shared, strict=True) for _, view in found)
    few = rows * GROUP <= SLOTS
    return [found if found and few else pieces(*each) for each, found in zip(several, shared, strict=True)]


def _shared(plan: UpdatePlan, p: Tensor) -> Pieces:
    """The shared pieces of a parameter; none where it is not small, or a size would be one, which is never left open."""
    size = plan.group_size
    packed = any(isinstance(codec, (Packed, Planar)) for _, codec in plan.codecs)
    if size in (None, 1) or packed or not p.is_contiguous() or p.numel() >= LARGE:
        return []
    _, length = rows_of(p.shape, size)
    rows, tail = p.numel() // length, length % size
    if tail in (0, 1) or rows < (4 if length < size else 2):
        return []
    plan = replace(plan, by_rows=True, any_width=True, begins_at_four=False)
    if length < size:
        return [(replace(plan, offset=i * length), _every_other(rows, i)) for i in range(2)]
    cut = [(begin, min(begin + size, length)) for begin in range(0, length, size)]
    return [(replace(plan, offset=begin), columns_of(rows, begin, end, length)) for begin, end in cut]


def _every_other(rows: int, first: int) -> View:
    return lambda t: t.view(rows, -1)[first::2]
