"""What is proven of the states of a captured step: which are never negative, and which forget.

    never negative   if all states called so are not, none of them becomes so: by bounds of every value
    forgets          of what it was, a state keeps less than the whole: |d state' / d state| < 1 along sums and products

A state that keeps all it was (a sum, a maximum, a product) would keep every rounding of its codes for good: it stays exact,
and so does what it is made of. So do states that a root is taken of through a difference: rounded, it may fall below zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from fp8compile.fx.graph import behind

aten = torch.ops.aten
INF = math.inf
BELOW_ONE = 1 - 2.0**-20
HARMLESS = {"device", "layout", "pin_memory", "memory_format", "non_blocking", "implicit"}  # keywords
Bounds = tuple[float, float]
EVERYTHING: Bounds = (-INF, INF)
NEVER_FORGETS = "it keeps all that it was, so every rounding would stay in it"
STAYS_IN = "its rounding would stay in {}, which keeps all that it was"
UNDER_A_ROOT = "a root is taken of its difference to another, which could fall below zero"


def class_of(number: float) -> Bounds:
    """Bounds that a number of a group is taken to stay within: [0, 1) but for 2**-20, [0, 1], [0, inf), or any."""
    if number == 0:
        return 0.0, 0.0
    classes = ((0.0, BELOW_ONE), (0.0, 1.0), (0.0, INF))
    return next(((low, high) for low, high in classes if low <= number <= high), EVERYTHING)


def _product(a: Bounds, b: Bounds) -> Bounds:
    ends = [0.0 if 0 in (x, y) else x * y for x in a for y in b]
    return min(ends), max(ends)


def _sum(a: Bounds, b: Bounds) -> Bounds:
    return a[0] + b[0], a[1] + b[1]


def _minus(a: Bounds) -> Bounds:
    return -a[1], -a[0]


def _hull(*several: Bounds) -> Bounds:
    return min(low for low, _ in several), max(high for _, high in several)


def _inverse(a: Bounds) -> Bounds:
    if a[0] < 0 < a[1] or a == (0.0, 0.0):
        return EVERYTHING
    ends = sorted(math.copysign(INF, a[0] + a[1]) if x == 0 else 1 / x for x in a)
    return ends[0], ends[1]


def _power(base: Bounds, exponent: Bounds) -> Bounds:
    if exponent == (2.0, 2.0):
        return _product(_absolute(base), _absolute(base))
    if base[0] < 0:
        return EVERYTHING
    if base[1] <= 1 and exponent[0] >= 0:
        return 0.0, 1.0 if exponent[0] < 1 else base[1]
    return 0.0, INF


def _absolute(a: Bounds) -> Bounds:
    return (0.0 if a[0] <= 0 <= a[1] else min(map(abs, a))), max(map(abs, a))


def _root(a: Bounds) -> Bounds:
    return math.sqrt(max(a[0], 0.0)), math.sqrt(max(a[1], 0.0))


def _clamped(a: Bounds, low: Bounds | None = None, high: Bounds | None = None) -> Bounds:
    low, high = low or (-INF, -INF), high or (INF, INF)
    return min(max(a[0], low[0]), high[0]), min(max(a[1], low[1]), high[1])


def _constant(x: Any) -> Any:
    return None if x is None else (float(x), float(x)) if isinstance(x, (int, float)) else EVERYTHING


RULES: dict[Any, Callable[..., Bounds]] = {
    aten.add: _sum,
    aten.sub: lambda a, b: _sum(a, _minus(b)),
    aten.rsub: lambda a, b: _sum(b, _minus(a)),
    aten.mul: _product,
    aten.div: lambda a, b: _product(a, _inverse(b)),
    aten.reciprocal: _inverse,
    aten.neg: _minus,
    aten.pow: _power,
    aten.sqrt: _root,
    aten.abs: _absolute,
    aten.maximum: lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    aten.minimum: lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    aten.clamp: _clamped,
    aten.sign: lambda a: (0.0 if a[0] >= 0 else -1.0, 1.0),
    aten.exp: lambda a: (0.0, INF),
    aten.where: lambda _, a, b: _hull(a, b),
    aten.lerp: lambda a, b, w: _hull(a, b) if 0 <= w[0] <= w[1] <= 1 else EVERYTHING,
    aten.addcmul: lambda a, b, c: _sum(a, _product(b, c)),
    **{packet: lambda a, *_: a for packet in (aten._to_copy, aten.clone, aten.expand, aten.view)},
    aten.ones_like: lambda *_: (1.0, 1.0),
    aten.zeros_like: lambda *_: (0.0, 0.0),
}


# What these become counts as new; what comparisons and signs become has no slope.
NEW = (
    *(aten.sqrt, aten.rsqrt, aten.pow, aten.reciprocal, aten.sign, aten.zeros_like, aten.ones_like),
    *(aten.gt, aten.lt, aten.ge, aten.le, aten.eq, aten.ne),
)
MOVES = (
    aten.expand,
    aten.view,
    aten._unsafe_view,
    aten.t,
    aten.transpose,
    aten.permute,
    aten.flip,
    aten.unsqueeze,
    aten.squeeze,
)


def packet_of(node: Node) -> Any:
    return getattr(node.target, "overloadpacket", None)


def _is_plain(node: Node) -> bool:
    """Whether it does what its arguments say: no keyword scales or rounds, and numbers stay numbers."""
    dtype: Any = node.kwargs.get("dtype") or torch.float32
    return {*node.kwargs} <= HARMLESS | {"dtype"} and dtype.is_floating_point and node.target is not aten.view.dtype


@dataclass(frozen=True)
class Proven:
    """What is proven of a step.

    Attributes:
        signed: by state, whether it may be negative.
        exact: states that stay exact, and why.
        roots: square roots whose argument is never negative.
    """

    signed: Mapping[str, bool]
    exact: Mapping[str, str]
    roots: frozenset[Node]


def proven(
    graph: Graph,
    known: Mapping[Node, Bounds],
    states: Mapping[str, Node],
    new: Mapping[str, Node],
    below: Collection[str] = (),
) -> Proven:
    """What holds of the states of a step.

    Args:
        known: bounds of placeholders; those that are missing may be anything.
        states, new: by name, the states' placeholders, and what becomes of them.
        below: states that begin below zero.
    """
    never_negative = {*states} - {*below}
    while True:
        assumed = {states[name]: (0.0, INF) for name in never_negative}
        bounds = bounds_of(graph, {**known, **assumed})
        kept = {name for name in never_negative if bounds[new[name]][0] >= 0}
        if kept == never_negative:
            break
        never_negative = kept
    exact = {name: NEVER_FORGETS for name in states if not forgets(states[name], new[name], bounds)}
    for kept_whole in [*exact]:
        exact = dict.fromkeys(_states_behind(new[kept_whole], states, new), STAYS_IN.format(kept_whole)) | exact
    roots = [node for node in graph.nodes if _is_root(node)]
    safe = {node for node in roots if bounds[node.args[0]][0] >= 0}
    for node in {*roots} - safe:
        exact |= dict.fromkeys(_states_behind(node, states, new), UNDER_A_ROOT)
    return Proven({name: name not in never_negative for name in states}, exact, frozenset(safe))


def _is_root(node: Node) -> bool:
    """Whether it is not a number where its first argument is negative."""
    if packet_of(node) is aten.pow:
        base, exponent = node.args
        return isinstance(base, Node) and not (isinstance(exponent, (int, float)) and float(exponent).is_integer())
    return packet_of(node) in (aten.sqrt, aten.rsqrt)


def _states_behind(node: Node, states: Mapping[str, Node], new: Mapping[str, Node]) -> list[str]:
    """Whose roundings reach it, in this step or through other states in later ones."""
    found: list[str] = []
    left = [node]
    while left:
        made_of = behind([left.pop()])
        reached = [name for name, each in states.items() if each in made_of and name not in found]
        found += reached
        left += [new[name] for name in reached]
    return found


def bounds_of(graph: Graph, known: Mapping[Node, Bounds]) -> dict[Node, Bounds]:
    """Bounds of every value of a graph."""
    found: dict[Any, Bounds] = {}
    for node in graph.nodes:
        rule = RULES.get(packet_of(node))
        if node.op != "call_function" or rule is None or not _is_plain(node):
            found[node] = known.get(node, EVERYTHING)
            continue
        if packet_of(node) is aten.mul and node.args[0] is node.args[1]:
            found[node] = _power(found[node.args[0]], (2.0, 2.0))
            continue
        taken = [found[each] if isinstance(each, Node) else _constant(each) for each in node.args]
        made = rule(*taken)
        found[node] = EVERYTHING if any(map(math.isnan, made)) else made
    return found


def forgets(state: Node, new: Node, bounds: Mapping[Node, Bounds]) -> bool:
    """Whether ``new`` keeps less of ``state`` than the whole. What becomes of it by roots and squares counts as new."""
    kept: dict[Node, Bounds] = {}
    for node in state.graph.nodes:
        kept[node] = (1.0, 1.0) if node is state else _kept(node, kept, bounds)
    low, high = kept[new]
    return low >= -BELOW_ONE and high <= BELOW_ONE


def _kept(node: Node, kept: Mapping[Node, Bounds], bounds: Mapping[Node, Bounds]) -> Bounds:
    nothing = (0.0, 0.0)

    def of(each: Any) -> Bounds:
        return kept[each] if isinstance(each, Node) else nothing

    def size(each: Any) -> Bounds:
        return bounds[each] if isinstance(each, Node) else _constant(each)

    packet, args = packet_of(node), node.args
    if all(kept[each] == nothing for each in node.all_input_nodes) or packet in NEW:
        return nothing
    if not _is_plain(node):
        return EVERYTHING
    if packet is aten.add:
        return _sum(of(args[0]), of(args[1]))
    if packet is aten.sub:
        return _sum(of(args[0]), _minus(of(args[1])))
    if packet is aten.rsub:
        return _sum(of(args[1]), _minus(of(args[0])))
    if packet is aten.abs and size(args[0])[0] < 0:
        return _hull(of(args[0]), _minus(of(args[0])))
    if packet is aten.neg:
        return _minus(of(args[0]))
    if packet is aten.mul:
        return _times(args[0], args[1], of, size)
    if packet is aten.div:
        return _product(of(args[0]), _inverse(size(args[1])))
    if packet is aten.addcmul:
        return _sum(of(args[0]), _times(args[1], args[2], of, size))
    if packet is aten.lerp:
        by = size(args[2])
        return _sum(_product(of(args[0]), _sum((1.0, 1.0), _minus(by))), _product(of(args[1]), by))
    if packet in (aten.maximum, aten.minimum):
        return _hull(of(args[0]), of(args[1]))
    if packet is aten.where:
        return _hull(of(args[1]), of(args[2]))
    if packet is aten.clamp:
        return _hull(of(args[0]), nothing)
    if packet in (aten._to_copy, aten.clone, aten.abs, *MOVES):
        return of(args[0])
    return EVERYTHING  # whatever it does


def _times(a: Any, b: Any, of: Callable[[Any], Bounds], size: Callable[[Any], Bounds]) -> Bounds:
    if a is b:
        return 0.0, 0.0
    return _sum(_product(of(a), size(b)), _product(of(b), size(a)))
