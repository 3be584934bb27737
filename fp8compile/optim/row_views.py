"""A parameter's tensors as rows of one group each, ``[numel / G, G]``.

So parameters of different shapes share compiled code (``open_sizes.py``), and Inductor sees directly that all of it is one
loop. Rows that end in a short group make two pieces: ``[R, full groups, G]``, of a single row ``[full groups, G]``; and
``[R, tail]``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fp8compile.numerics.states.interface import GROUP, columns_within, rows_of
from fp8compile.optim.plan import INV_SCALE16, Tensors, UpdatePlan
from fp8compile.optim.planes import named_planes, parted, planes_of
from fp8compile.optim.step_codes import INV_SCALE, KNOWN

FIXED = ("step", "numbers", "stream", INV_SCALE, INV_SCALE16, KNOWN)  # tensors that are not parts of the parameter
LARGE = 2**19  # elements of a parameter that pays for kinds of kernels of its own (``small_parameters.py``)
View = Callable[[Tensor], Any]  # a tensor, or its planes


def pieces(plan: UpdatePlan, p: Tensor) -> list[tuple[UpdatePlan, View]]:
    """The pieces in which ``p`` is updated: the plan of each, and how its tensors are viewed."""
    size = plan.group_size
    if size is None or not p.is_contiguous():
        return [(as_one_piece(plan, p), lambda t: t)]
    if size == 1:
        whole_rows = p.numel() >= LARGE and p.numel() % GROUP == 0
        return [(replace(plan, by_rows=True), lambda t: t.view(-1, GROUP) if whole_rows else t.view(-1))]
    _, length = rows_of(p.shape, size)
    if length <= size or length % size == 0:
        rows = p.numel() // min(size, length)
        return [_piece(plan, lambda t: t.view(rows, -1), min(size, length))]
    full, rows = length // size * size, p.numel() // length
    tails = _piece(replace(plan, offset=full), columns_of(rows, full, length, length), length - full)
    before = columns_of(rows, 0, full, length)
    if rows == 1:
        return [_piece(plan, lambda t: before(t).view(full // size, -1), size), tails]
    # Rows of several groups stay in one piece; planes have two dimensions.
    return [(replace(plan, by_rows=True), lambda t: torch.unflatten(before(t), 1, (full // size, -1))), tails]


def columns_of(rows: int, begin: int, end: int, length: int) -> View:
    """The view of elements ``begin`` to ``end`` of every row of ``length``: whole groups, and the last of a row."""

    def view(t: Tensor) -> Tensor:
        t_RC = t.view(rows, -1)
        columns = t_RC.shape[1]
        last = columns if end == length else columns_within(columns, end, length)
        return t_RC[:, columns_within(columns, begin, length) : last]

    return view


def as_one_piece(plan: UpdatePlan, p: Tensor) -> UpdatePlan:
    """The plan of an update that is compiled without being cut."""
    return replace(plan, in_pieces=p.device.type == "cpu")


def _piece(plan: UpdatePlan, view: View, size: int) -> tuple[UpdatePlan, View]:
    """A piece whose groups, of ``size``, are the last dimension of what ``view`` returns: in planes, where there are some."""
    plan, planes = replace(plan, by_rows=True), planes_of(plan, size)
    if planes == 1:
        return plan, view
    return replace(plan, planes=planes), lambda t: parted(view(t), size, planes)


def viewed(tensors: Tensors, view: View) -> Tensors:
    """The tensors of one piece; the gradient, which is only read, is copied where it cannot be viewed."""
    found: Tensors = {}
    for name, t in tensors.items():
        found |= named_planes(name, _one(name, t, view))
    return found


def _one(name: str, t: Tensor, view: View) -> Any:
    if name in FIXED:
        return t
    return view(t.contiguous()) if name == "grad" else view(t)
