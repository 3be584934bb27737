"""What a forward normalises: values of which it takes a statistic, and which it then centres or divides by it.

    y = (x - m) s       m and s have fewer elements than x, and are made from sums over x: LayerNorm, BatchNorm, GroupNorm,
                        InstanceNorm; without m RMSNorm and x / |x|; by hand or decomposed, in any order of operations

What comes behind a norm has a size of its own, whatever that of x: an error of x counts relative to x's deviation from m. A
code of x is off by a share of the largest of its group instead, which may be larger by any factor: the mean beside the
deviation, or another channel. So a value that is normalised is stored about its statistics, or in a group over which they
are one number each (``fp8compile/saved/about.py``), or exactly. And it is stored itself: where the backward would compute
it from codes of other values (``K x`` with one large K, a sum), these have to stay exact.

Left out, since their error is small beside themselves: exponentials divided by their own sum (a softmax), and gains, which
multiply by a statistic (x |x| / mean(|x|)) and so leave what is small small.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from fp8compile import _torch as private
from fp8compile.analysis.ranges.matching import CAST_PACKETS, RESHAPE_PACKETS, packet
from fp8compile.fx.graph import COPY_OF, is_tensor, numel
from fp8compile.fx.ops import is_pointwise

aten = torch.ops.aten

SUMS = {aten.mean, aten.sum}
SIZES = {aten.var, aten.std, aten.var_mean, aten.linalg_vector_norm, aten.norm}
EXPANSIONS = {aten.expand, aten.as_strided}
SAME_ELEMENTS = CAST_PACKETS | RESHAPE_PACKETS | {aten.permute, aten.transpose, aten.t}
INVERSES = {aten.rsqrt, aten.reciprocal}
EXPONENTIALS = {aten.exp, aten.exp2}


@dataclass(frozen=True)
class Norm:
    """How a value is normalised.

    Attributes:
        mean: what is subtracted from it; None where nothing is.
        scale: what the rest is multiplied with, or divided by; None where the way from a statistic to it is not followed.
        divides: whether it is divided by ``scale``.
        seen: the view of it, or with ``is_direct`` off what is made of it, over which ``mean`` and ``scale`` broadcast.
        is_direct: whether it is the value itself that is divided; else a function of it, element by element.
        is_known: whether this is all that is done with its statistics.
    """

    mean: Node | None = None
    scale: Node | None = None
    divides: bool = False
    seen: Node | None = None
    is_direct: bool = True
    is_known: bool = True


@dataclass(frozen=True)
class _Statistic:
    """A number for many elements.

    Attributes:
        of: of which values.
        inverse: whether it has been a divisor.
        plain_mean: whether it is a mean and nothing more.
        var_mean: the operation that it is made from, where it is one that gives mean and variance.
    """

    of: frozenset[Node]
    inverse: bool = False
    plain_mean: bool = False
    var_mean: Node | None = None


def itself(node: Node) -> Node:
    """The value behind casts and views that keep all its elements."""
    return way_to(node)[0]


def way_to(node: Node) -> list[Node]:
    """The value behind casts and views that keep all its elements, then these, down to ``node`` or what it is a copy of."""
    node = node.meta.get(COPY_OF, node)
    found = [node]
    while packet(node) in SAME_ELEMENTS and is_tensor(node.args[0]):
        parent = node.args[0]
        assert isinstance(parent, Node)
        if numel(parent.meta["val"]) != numel(node.meta["val"]):
            break
        node = parent
        found.insert(0, node)
    return found


def norms_of(graph: Graph) -> Mapping[Node, Norm]:
    """The values that a forward graph normalises, each behind its views and casts (``itself``)."""
    return _Finder(graph).found


class _Finder:
    """One walk down a graph; ``found`` is what it finds."""

    def __init__(self, graph: Graph) -> None:
        self.found: dict[Node, Norm] = {}
        self._statistics: dict[Node, _Statistic] = {}
        self._centred: dict[Node, Node] = {}  # x - m, and x
        for node in graph.nodes:
            if node.op == "call_function":
                self._visit(node)

    def _visit(self, node: Node) -> None:
        read = [n for n in node.all_input_nodes if n in self._statistics]
        if made := self._reduction(node) or self._of_statistics(node, read):
            self._statistics[node] = made
        elif read and is_tensor(node) and is_pointwise(node):
            for statistic in read:
                for value in self._statistics[statistic].of:
                    self._use(node, statistic, value)

    def _reduction(self, node: Node) -> _Statistic | None:
        op = packet(node)
        if op not in SUMS | SIZES or not is_tensor(node.args[0]):
            return None
        operand: Node = node.args[0]  # type: ignore[assignment]
        results = node.meta["val"] if op is aten.var_mean else (node.meta["val"],)
        if not operand.meta["val"].is_floating_point() or numel(results[0]) >= numel(operand.meta["val"]):
            return None
        of = frozenset(self._taken_of(operand))
        known_as = node if op is aten.var_mean else None
        return _Statistic(of, False, op in SUMS and itself(operand) in of, known_as) if of else None

    def _taken_of(self, operand: Node) -> Iterator[Node]:
        """The values that a reduction is a statistic of: what it sums, without squares, magnitudes and centres."""
        node = itself(operand)
        while True:
            inner = _under_a_square(node)
            if inner is None:
                if packet(node) not in EXPONENTIALS and node not in self._statistics:
                    yield node
                inner = self._centred.get(node)
            if inner is None:
                return
            node = itself(inner)

    def _of_statistics(self, node: Node, read: list[Node]) -> _Statistic | None:
        """Of an operation on statistics alone, or on them and numbers for as many elements."""
        op = packet(node)
        if not read or node.op != "call_function":
            return None
        known = [self._statistics[n] for n in read]
        of = frozenset[Node]().union(*(each.of for each in known))
        if node.target is private.getitem:  # var_mean: the second is the mean
            return dataclasses.replace(known[0], plain_mean=bool(node.args[1] == 1))
        if not is_tensor(node) or not (is_pointwise(node) or op in SAME_ELEMENTS | EXPANSIONS):
            return None
        least = min(numel(value.meta["val"]) for value in of)
        if op not in EXPANSIONS and numel(node.meta["val"]) >= least:
            return None
        inverse = any(each.inverse for each in known) or _divides_by(node, read)
        made = {each.var_mean for each in known}
        one = made.pop() if len(made) == 1 else None
        return _Statistic(of, inverse, op in SAME_ELEMENTS | EXPANSIONS and known[0].plain_mean, one)

    def _use(self, node: Node, statistic: Node, value: Node) -> None:
        """Note what an operation on elements does with a value and a statistic of it."""
        others = [n for n in node.all_input_nodes if n is not statistic and is_tensor(n)]
        direct = next((n for n in others if value in (itself(n), self._centred.get(itself(n)))), None)
        of = self._statistics[statistic]
        if of.var_mean is not None and packet(node) in (aten.add, aten.sub, aten.mul, aten.div):
            if any(_is_made_of(n, value) for n in others):
                self._note(value, _of_var_mean(of.var_mean))
            if packet(node) is aten.sub and direct is not None and itself(direct) is value:
                self._centred[node] = value
        elif packet(node) in (aten.add, aten.sub):
            self._centring(node, statistic, value, direct, others)
        elif packet(node) is aten.div and node.args[1] is statistic and not of.inverse:
            self._scaling(node, statistic, value, direct, True, others)
        elif packet(node) is aten.mul and of.inverse:
            self._scaling(node, statistic, value, direct, False, others)

    def _centring(self, node: Node, statistic: Node, value: Node, direct: Node | None, others: list[Node]) -> None:
        of, plain = self._statistics[statistic], packet(node) is aten.sub and not node.kwargs
        if direct is not None and itself(direct) is value and plain and node.args[0] is direct:
            self._centred[node] = value
            self._note(value, Norm(mean=_small(statistic), seen=direct))
        elif not (of.plain_mean and packet(node) is aten.add) and any(_is_made_of(n, value) for n in others):
            self._note(value, Norm(is_known=False))

    def _scaling(
        self, node: Node, statistic: Node, value: Node, direct: Node | None, divides: bool, others: list[Node]
    ) -> None:
        scaled = direct or next((n for n in others if _is_made_of(n, value)), None)
        if scaled is not None:
            self._note(value, Norm(None, _small(statistic), divides, scaled, direct is not None))

    def _note(self, value: Node, new: Norm) -> None:
        """Add to what is known of a value. A second norm is the same but for its gain, or it is one too many."""
        old = self.found.get(value)
        if old is None or not new.is_known or not old.is_known:
            self.found[value] = new if old is None else Norm(is_known=False)
            return
        pairs = ((old.seen, new.seen), (old.mean, new.mean), (old.scale, new.scale))
        is_same = all(a is None or b is None or a.meta["val"].shape == b.meta["val"].shape for a, b in pairs)
        merged = dataclasses.replace(old, mean=old.mean or new.mean, is_direct=old.is_direct and new.is_direct)
        if old.scale is None:
            merged = dataclasses.replace(merged, scale=new.scale, divides=new.divides)
        self.found[value] = merged if is_same else Norm(is_known=False)


def _of_var_mean(node: Node) -> Norm:
    """What mean and variance are for: whatever is made of them, they centre and divide over the same elements."""
    operand = node.args[0]
    assert isinstance(operand, Node)
    variance, mean = (next((u for u in node.users if u.args[1] == i), None) for i in (0, 1))
    with_eps = [u for u in (variance.users if variance else ()) if packet(u) is aten.add]
    scale = next((u for each in with_eps for u in each.users if packet(u) is aten.rsqrt), None)
    return Norm(mean, scale, seen=operand, is_known=mean is not None)


def _small(statistic: Node) -> Node:
    """A statistic before it is repeated for each element."""
    while packet(statistic) in EXPANSIONS:
        statistic = statistic.args[0]  # type: ignore[assignment]
    return statistic


def _under_a_square(node: Node) -> Node | None:
    """What a node is the square or the magnitude of; None where it is neither."""
    op, args = packet(node), node.args
    squared = (op is aten.mul and args[0] is args[1]) or (op is aten.pow and args[1] == 2)
    if not squared and op not in (aten.square, aten.abs):
        return None
    inner = args[0]
    return itself(inner) if isinstance(inner, Node) else None


def _divides_by(node: Node, read: list[Node]) -> bool:
    op = packet(node)
    if op is aten.pow:
        return isinstance(node.args[1], (int, float)) and node.args[1] < 0
    return op in INVERSES or (op is aten.div and node.args[1] in read)


def _is_made_of(node: Node, value: Node) -> bool:
    """Whether a value makes ``node``, element by element."""
    size, seen, waiting = numel(value.meta["val"]), {node}, [node]
    while waiting:
        each = waiting.pop()
        if each is value:
            return True
        if is_pointwise(each) or packet(each) in SAME_ELEMENTS:
            full = [
                p for p in each.all_input_nodes if is_tensor(p) and numel(p.meta["val"]) == size and p not in seen
            ]
            seen.update(full)
            waiting += full
    return False
