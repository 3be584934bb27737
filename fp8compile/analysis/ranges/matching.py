"""Finding in a graph what the relations between values are about: a value through casts, a reduction laid along its operand.

An operand is matched by node, through casts and copies that lose nothing. A reduction is matched only where it is broadcast
over the dimensions that it ran over (``Spread``): x - amax(x, 0) says nothing if the maximum is broadcast along another axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from fp8compile import _torch as private
from fp8compile.analysis.ranges.bounds import Bound, size
from fp8compile.analysis.ranges.interval import ANYTHING, FUNCTION_ERROR, Interval, bits_of, exactly
from fp8compile.fx.graph import is_tensor

aten, prims = torch.ops.aten, torch.ops.prims

Known = Mapping[Node, Any]  # an Interval, or a tuple of them
# Operations of any overload; ``CASTS`` and ``RESHAPES`` of fx/ops.py list overloads, and neither of them holds copies.
CAST_PACKETS = {prims.convert_element_type, aten._to_copy, aten.clone, aten.alias, aten.detach}
RESHAPE_PACKETS = {aten.view, aten.reshape, aten._unsafe_view, aten.unsqueeze, aten.squeeze}


class Spread(NamedTuple):
    """A value that another repeats: ``node``, laid out as ``shape`` (``reshaped`` on the way), after a relative ``error``."""

    node: Node
    shape: tuple[Any, ...]
    reshaped: bool
    error: float


def packet(node: object) -> object:
    """The operation of a node, of any overload; None for a view of its bits as another dtype, which is no view of numbers."""
    if not isinstance(node, Node) or node.target is aten.view.dtype:
        return None
    return getattr(node.target, "overloadpacket", node.target)


def of(known: Known, value: object) -> Interval:
    """The range of an argument: a value of the graph, or a number."""
    if isinstance(value, Node):
        found = known.get(value)
        return found if isinstance(found, Interval) else ANYTHING
    return exactly(float(value)) if isinstance(value, (int, float)) else ANYTHING


def argument(node: Node, index: int, name: str, default: Any = None) -> Any:
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def reduced(node: Node, index: int = 1) -> list[int]:
    """The dimensions that a reduction runs over."""
    count = node.args[0].meta["val"].dim()  # type: ignore[union-attr]
    dims = argument(node, index, "dim")
    dims = [dims] if isinstance(dims, int) else dims or range(count)
    return [d % max(count, 1) for d in dims]


def elements(operand: Any, dims: Iterable[Any]) -> Bound:
    """How many elements of ``operand`` a reduction over ``dims`` combines into one, as a bound."""
    shape = operand.meta["val"].shape
    return math.prod((size(shape[d]) for d in dims), start=1.0) if shape else 1.0


def same(a: object, b: object) -> bool:
    """Whether two arguments have the same elements in the same places: one node, or exact casts of one."""
    return isinstance(a, Node) and isinstance(b, Node) and original(a) is original(b)


def touched(x: Any) -> set[int] | None:
    """The dimensions over which the maximum of ``x`` is 0: x - amax(x), and positive multiples."""
    x = original(x)
    if packet(x) in (aten.mul, aten.div) and isinstance(x.args[1], (int, float)) and x.args[1] > 0:
        return touched(x.args[0])
    found = extremum(x)
    return set(reduced(found)) if found is not None and packet(found) is not aten.amin else None


def correction(node: Node) -> Any:
    """What a variance subtracts from n."""
    return node.kwargs.get("correction", 1) if "correction" in str(node.target) else None


def original(node: Any) -> Any:
    """What ``node`` is a copy of: through casts to a dtype that holds every value of the one before."""
    while packet(node) in CAST_PACKETS and is_tensor(node.args[0]) and not _loses(node):
        node = node.args[0]
    return node


def through_casts(node: Any) -> Any:
    """What ``node`` is a copy of, rounded or not."""
    while packet(node) in CAST_PACKETS:
        node = node.args[0]
    return node


def spread(node: Node, shape: Any = None, reshaped: bool = False) -> Spread:
    """What ``node`` repeats: through casts, expansions and, before those, views that keep the order of the elements."""
    error, shape = 0.0, node.meta["val"].shape if shape is None else shape
    while is_tensor(node):
        if packet(node) in CAST_PACKETS:
            error += ulp(node) if _loses(node) else 0.0
        elif packet(node) is aten.expand and not reshaped:
            shape = node.args[0].meta["val"].shape  # type: ignore[union-attr]
        elif packet(node) in RESHAPE_PACKETS:
            reshaped = True
        else:
            break
        node = node.args[0]  # type: ignore[assignment]
    return Spread(node, tuple(shape), reshaped, error)


def is_laid_along(shape: tuple[Any, ...], reduction: Node, dims: list[int]) -> bool:
    """Whether ``shape`` is that of the operand with 1 in place of ``dims``; ones in front do not matter."""
    whole = reduction.args[0].meta["val"].shape  # type: ignore[union-attr]
    kept = [1.0 if d in dims else size(n) for d, n in enumerate(whole)]
    return _without_ones(kept) == _without_ones([size(n) for n in shape])


def ulp(node: Node) -> float:
    """The relative error of one rounding to the dtype of ``node``, or of a function in FP32, whichever is more."""
    return max(0.5 ** bits_of(node.meta["val"].dtype), FUNCTION_ERROR)


def extremum(node: Any) -> Node | None:
    """amax or amin of x where ``node`` is x - amax(x); also where an infinite one is replaced by 0, as logsumexp does."""
    if packet(node) is not aten.sub or node.kwargs or not is_tensor(node.args[1]):
        return None
    place = spread(node.args[1])
    if is_guarded(node):
        inner = spread(place.node.args[2], place.shape, place.reshaped)  # type: ignore[arg-type]
        place = inner._replace(error=place.error + inner.error)
    y: Any = place.node
    if packet(y) is private.getitem and packet(y.args[0]) in (aten.max, aten.min) and y.args[1] == 0:
        y = y.args[0]
    if packet(y) not in (aten.amax, aten.amin, aten.max, aten.min) or place.error or is_tensor(argument(y, 1, "dim")):
        return None
    fits = same(y.args[0], node.args[0]) and is_laid_along(place.shape, y, reduced(y))
    return y if fits else None


def is_guarded(node: Node) -> bool:
    """Whether ``node`` is x - where(|m| == inf, 0, m)."""
    y: Any = spread(node.args[1]).node if is_tensor(node.args[1]) else None  # type: ignore[arg-type]
    if packet(y) is not aten.where or packet(y.args[0]) is not aten.eq or y.args[0].args[1] != math.inf:
        return False
    return packet(y.args[0].args[0]) is aten.abs and y.args[0].args[0].args[0] is y.args[2]


def log_sum(node: Any) -> Spread | None:
    """l where ``node`` is x - l and l = log(sum(exp(x))), or l = log(sum(exp(x - m))) + m for an extremum m."""
    if packet(node) is not aten.sub or node.kwargs or not (is_tensor(node.args[0]) and is_tensor(node.args[1])):
        return None
    place = spread(node.args[1])
    terms = place.node.args[:2] if packet(place.node) is aten.add else (place.node,)
    for log in terms:
        total = _of(log, aten.log, aten.sum)
        x = original(total.args[0].args[0]) if total is not None and packet(total.args[0]) is aten.exp else None
        if x is None or not is_laid_along(place.shape, total, reduced(total)):
            continue
        if len(terms) == 1 and same(x, node.args[0]):
            return place
        m = next(term for term in terms if term is not log) if len(terms) == 2 else None
        if packet(x) is aten.sub and same(x.args[0], node.args[0]) and is_tensor(m) and _is_laid_like(x.args[1], m):
            return place if extremum(x) is not None else None
    return None


def _of(node: Any, *packets: object) -> Any:
    """The innermost of a chain of operations, each applied to the one after it; None for any other node."""
    for each in packets:
        node = spread(node).node if is_tensor(node) else None
        if packet(node) is not each:
            return None
        found, node = node, node.args[0]
    return found


def _is_laid_like(a: Node, b: Any) -> bool:
    """Whether two nodes repeat one value, not rounded, whatever dimensions of size 1 they have."""
    one, other = spread(a), spread(b)
    return one.node is other.node and one.error == other.error == 0


def _loses(cast: Node) -> bool:
    """Whether a cast may round. (``torch.promote_types`` does not know FP8, the dtype of a matmul operand's codes.)"""
    after, before = cast.meta["val"].dtype, cast.args[0].meta["val"].dtype  # type: ignore[union-attr]
    if after == before:
        return False
    if after.is_floating_point and before.is_floating_point:
        wide, narrow = torch.finfo(after), torch.finfo(before)
        finest = (wide.smallest_normal * wide.eps, narrow.smallest_normal * narrow.eps)  # subnormals
        return wide.eps > narrow.eps or wide.max < narrow.max or finest[0] > finest[1]
    return not after.is_floating_point or before.is_complex or after.itemsize == 1


def _without_ones(shape: list[Bound]) -> list[Bound]:
    first = next((i for i, n in enumerate(shape) if n != 1.0), len(shape))
    return shape[first:]
