"""Range analysis: what is proven of every value of a graph, whatever its finite inputs are.

A node's range follows from its inputs' by the rule of its operation (table.py) and what holds between values (relations.py),
in exact arithmetic widened for rounding (interval.py). An operation without a rule gets (-inf, inf), vanishing: nothing is
proven, nothing is wrong.

A range speaks of numbers. Where something was divided by 0, or a mask holds -inf, an element may be NaN later on; then some
value before it has an unbounded range, and FP32 has the same NaN.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from fp8compile.analysis.ranges.bounds import Bound, greatest, least, size
from fp8compile.analysis.ranges.interval import ANYTHING, Interval, between, exactly, hull, rounded
from fp8compile.analysis.ranges.matching import of, original, packet
from fp8compile.analysis.ranges.relations import RELATIONS
from fp8compile.analysis.ranges.rules import input_range, of_dtype
from fp8compile.analysis.ranges.table import EXACT, INTEGERS, RULES

__all__ = ["Interval", "ranges"]

aten, prims = torch.ops.aten, torch.ops.prims
_COMPARISONS: dict[object, bool] = {aten.gt: True, aten.ge: True, aten.lt: False, aten.le: False}
_RECOMPUTED = {  # operations in a branch of a where that are evaluated again for a narrower operand
    prims.convert_element_type, aten.add, aten.sub, aten.mul, aten.div, aten.neg, aten.exp, aten.expm1, aten.log1p,
    aten.reciprocal, aten.abs, aten.pow, aten.sigmoid, aten.tanh,
}  # fmt: skip


def ranges(graph: Graph, known: Mapping[Node, Interval] | None = None) -> dict[Node, Interval]:
    """The range of every value with numbers in it: tensors and sizes. ``known`` ones (from calibration) override.

    A range with a symbolic size in its bounds fits if it fits for every size that torch's shape environment allows.
    """
    found: dict[Node, Any] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        found[node] = _given(known[node]) if known and node in known else _range(node, found)
    return {node: x for node, x in found.items() if isinstance(x, Interval)}


def _given(x: Interval) -> Interval:
    """A range from outside, whose bounds may be integers."""
    lower, upper = (float(b) if isinstance(b, (int, float)) else b for b in (x.lower, x.upper))
    return Interval(lower, upper, x.vanishing)


def _range(node: Node, found: Mapping[Node, Any]) -> Any:
    value = node.meta.get("val")
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return exactly(size(value))
    if node.op in ("placeholder", "get_attr"):
        return input_range(node)
    if isinstance(value, torch.Tensor):
        return _of_tensor(node, value.dtype, found)
    if isinstance(value, (tuple, list)) and packet(node) in RULES:
        parts = RULES[packet(node)][0](node, found)
        if not isinstance(parts, tuple):
            return None
        return tuple(_rounded(x, v, RULES[packet(node)][1]) for x, v in zip(parts, value, strict=False))
    return None


def _of_tensor(node: Node, dtype: torch.dtype, found: Mapping[Node, Any]) -> Interval:
    if not dtype.is_floating_point:
        return _of_integers(node, dtype, found)
    if packet(node) not in RULES:
        return ANYTHING
    rule, error = RULES[packet(node)]
    result = rule(node, found)
    for relation in RELATIONS.get(packet(node), ()):
        if (other := relation(node, found)) is not None:
            result = _both(result, other)
    if packet(node) is aten.where:
        result = _chosen(node, found) or result
    return result if error is EXACT else rounded(result, dtype, error)


def _of_integers(node: Node, dtype: torch.dtype, found: Mapping[Node, Any]) -> Interval:
    """Integers may wrap around, but not for sizes that occur; only some operations act on them as on real numbers."""
    whole = of_dtype(dtype)
    if packet(node) not in INTEGERS:
        return whole
    result: Interval = RULES[packet(node)][0](node, found)
    fits = all(not isinstance(bound, float) or abs(bound) <= whole.amax for bound in (result.lower, result.upper))
    return result if fits else whole


def _chosen(node: Node, found: Mapping[Node, Any]) -> Interval | None:
    """where(x > c, a, b): where it is chosen, a is computed from x >= c, and b from x <= c, as in elu and softplus."""
    condition, *branches = node.args
    if not isinstance(condition, Node) or packet(condition) not in _COMPARISONS:
        return None
    x, c = condition.args
    if not isinstance(x, Node) or not isinstance(found.get(x), Interval) or not isinstance(c, (int, float)):
        return None
    above, below = (float(c), math.inf), (-math.inf, float(c))
    halves = (above, below) if _COMPARISONS[packet(condition)] else (below, above)
    return hull(
        _under(b, original(x), _both(found[x], Interval(*half, found[x].vanishing)), found)
        for b, half in zip(branches, halves, strict=True)
    )


def _under(branch: object, x: Node, narrow: Interval, found: Mapping[Node, Any], depth: int = 8) -> Interval:
    """The range of ``branch``, which is computed element by element from ``x``, where ``x`` is within ``narrow``."""
    if not isinstance(branch, Node):
        return of(found, branch)
    if original(branch) is x:
        return narrow
    if not depth or packet(branch) not in _RECOMPUTED:
        return of(found, branch)
    inputs = {n: _under(n, x, narrow, found, depth - 1) for n in branch.all_input_nodes}
    again = _of_tensor(branch, branch.meta["val"].dtype, ChainMap(inputs, cast(dict[Node, Any], found)))
    return _both(of(found, branch), again)


def _rounded(x: Interval, value: object, error: float | None) -> Interval:
    if error is EXACT or not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
        return x
    return rounded(x, value.dtype, error)


def _both(x: Interval, relation: Interval) -> Interval:
    """Two proofs combined; whether the value vanishes is for the relation to say."""
    lower: Bound = greatest([x.lower, relation.lower])
    upper: Bound = least([x.upper, relation.upper])
    return between(lower, upper, relation.vanishing)
