"""Whether a value is proven to be a softmax's result, and along which of its dimensions it sums to 1.

    softmax(x, dim), _safe_softmax(x, dim)              as one operation
    e / sum(e, dim, keepdim=True)  with e = exp(...)    as Inductor's decomposition leaves it; what is exponentiated does not
                                                        matter: e is not negative, and its quotients sum to 1
    where(rows, 0, such a quotient)                     with one choice for each row, as _safe_softmax leaves it: a row is
                                                        zeros or a softmax's
    casts, copies and views of these                    that keep the dimension as it is

What is dropped out, masked element by element or scaled afterwards does not sum to 1, and is not found. Nor is what is summed
over several dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8compile.analysis.ranges.matching import (
    CAST_PACKETS,
    RESHAPE_PACKETS,
    is_laid_along,
    original,
    packet,
    reduced,
    same,
    spread,
    through_casts,
)
from fp8compile.fx.graph import is_tensor

aten = torch.ops.aten

AS_ONE = (aten._softmax, aten._safe_softmax)
EXPONENTIALS = (aten.exp, aten.exp2)
CONSTANTS = (aten.full, aten.scalar_tensor)


def softmax_dim(value: Node) -> int | None:
    """The dimension along which ``value`` is proven to be a softmax's result (counted from 0); None where it is not."""
    views: list[Node] = []
    node: Any = value
    while packet(node) in (*CAST_PACKETS, *RESHAPE_PACKETS, aten.permute, aten.expand):
        if not is_tensor(node.args[0]) or not node.meta["val"].dtype.is_floating_point:
            return None
        views.append(node)
        node = node.args[0]
    dim = _made_along(node)
    for view in reversed(views):
        dim = None if dim is None else _moved(view, dim)
    return dim


def _made_along(node: Node) -> int | None:
    """The dimension of the softmax that this operation, or the last of these operations, is."""
    op = packet(node)
    if op in AS_ONE:
        dim, rank = node.args[1], node.meta["val"].dim()
        return dim % rank if isinstance(dim, int) and rank else None
    if op is aten.where:
        return _chosen_by_row(node)
    return _divided_by_its_sum(node) if op is aten.div and not node.kwargs else None


def _divided_by_its_sum(node: Node) -> int | None:
    e, below = node.args[:2]
    if not is_tensor(e) or not is_tensor(below) or packet(original(e)) not in EXPONENTIALS:
        return None
    place = spread(below)  # type: ignore[arg-type]
    total = place.node
    if packet(total) is not aten.sum or not same(total.args[0], e) or len(dims := reduced(total)) != 1:
        return None
    return dims[0] if is_laid_along(place.shape, total, dims) else None


def _chosen_by_row(node: Node) -> int | None:
    """where(mask, 0, p) or where(mask, p, 0): the mask has one element for each row of p."""
    mask, *both = node.args
    zeros = [a for a in both if packet(a) in CONSTANTS and (a.args[1] if packet(a) is aten.full else a.args[0]) == 0]  # type: ignore[union-attr]
    rest = [a for a in both if a not in zeros]
    if len(zeros) != 1 or not is_tensor(mask) or not is_tensor(rest[0]):
        return None
    p: Any = through_casts(rest[0])
    shape, of_mask = node.meta["val"].shape, mask.meta["val"].shape  # type: ignore[union-attr]
    if len(p.meta["val"].shape) != len(shape) or not _same_sizes(p.meta["val"].shape, shape):
        return None
    dim = _divided_by_its_sum(p) if packet(p) is aten.div and not p.kwargs else None
    at = -1 if dim is None else dim - len(shape) + len(of_mask)
    return dim if dim is not None and (at < 0 or statically_known_true(of_mask[at] == 1)) else None


def _moved(view: Node, dim: int) -> int | None:
    """Where a dimension is after a cast, a copy or a view; None where it does not keep its elements together."""
    before, after = view.args[0].meta["val"].shape, view.meta["val"].shape  # type: ignore[union-attr]
    if packet(view) in CAST_PACKETS:
        return dim
    if packet(view) is aten.permute:
        order: Any = view.args[1]
        return next(at for at, d in enumerate(order) if d % len(before) == dim)
    if packet(view) is aten.expand:
        at = dim + len(after) - len(before)
        return at if statically_known_true(before[dim] == after[at]) else None
    ends = [at for at, size in enumerate(after) if _is(size, before[dim])]  # all sizes multiply to the same
    return next((at for at in ends if _same_product(before[dim + 1 :], after[at + 1 :])), None)


def _is(a: Any, b: Any) -> bool:
    return statically_known_true(a == b)


def _same_product(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return _is(math.prod(a), math.prod(b))


def _same_sizes(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return all(map(_is, a, b))
