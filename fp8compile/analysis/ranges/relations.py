"""Relations between a value and another made from it, which ranges alone do not show.

x x >= 0;   x - amax(x) <= 0, so exp of it is at most 1 and sums to at least 1;   |a| / d <= K where |a|^p <= K d^p

The last is a softmax (d = sum(a), a >= 0), a norm (d^2 = sum(a^2), K = 1), a normalisation (d^2 = mean(a^2), K = sqrt(n)).
Each relation gives the range that it proves of a node, or None. This range holds in addition to the one from the node's
operation. Whether the value vanishes is for the relation to say: a value divided by its own size is not tiny. A row so small
that its squares are below FP32's normal numbers is not considered: without an epsilon, it is divided by 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from fp8compile import _torch as private
from fp8compile.analysis.ranges.bounds import at_least, at_most, nonnegative, positive
from fp8compile.analysis.ranges.interval import ZERO, Interval, bits_of, enlarged, exactly, hull, over
from fp8compile.analysis.ranges.matching import (
    Known,
    Spread,
    argument,
    correction,
    elements,
    extremum,
    is_guarded,
    is_laid_along,
    log_sum,
    of,
    original,
    packet,
    reduced,
    same,
    spread,
    through_casts,
    touched,
    ulp,
)
from fp8compile.fx.graph import is_tensor

aten = torch.ops.aten
ANYWHERE = (-math.inf, math.inf)


def square(node: Node, known: Known) -> Interval | None:
    """x x is not negative."""
    a, b = node.args[:2]
    return Interval(0.0, math.inf, known[a].vanishing) if isinstance(a, Node) and same(a, b) else None


def shifted(node: Node, known: Known) -> Interval | None:
    """x - amax(x) <= 0, x - amin(x) >= 0: an extremum is one of the elements, and nothing is rounded before its subtraction.

    x - logsumexp(x) <= 0 too, but a logsumexp is rounded: the sum by less than 2^-11, the rest by its last places.
    """
    if found := extremum(node):
        return Interval(*((-math.inf, 0.0) if packet(found) in (aten.amax, aten.max) else (0.0, math.inf)))
    total = log_sum(node)
    if total is None:
        return None
    return Interval(-math.inf, 2.0**-10 + known[total.node].amax * (4 * ulp(total.node) + total.error))


def exponential(node: Node, known: Known) -> Interval | None:
    """exp(x - amax(x)) is 1 somewhere in each row, and a softmax at least 1/n: neither vanishes."""
    x = original(node.args[0])
    return Interval(*ANYWHERE) if touched(x) is not None or log_sum(through_casts(x)) is not None else None


def counted(node: Node, known: Known) -> Interval | None:
    """sum(exp(x - amax(x))) >= 1 over the dimensions of the maximum: the element that is the maximum gives exp(0)."""
    e = original(node.args[0])
    x = original(e.args[0]) if packet(e) is aten.exp else None
    dims = None if x is None else touched(x)
    if x is None or dims is None or not dims <= set(reduced(node)):
        return None
    while packet(x) is not aten.sub:
        x = original(x.args[0])  # the multiple that touched() saw through
    if is_guarded(x) and at_least(known[x.args[0]].lower) == -math.inf:
        return None  # a row of -inf alone
    return Interval(1 - 2.0**-20, math.inf)


def quotient(node: Node, known: Known) -> Interval | None:
    """|a| / d <= K if |a| <= K d; a product with a negative power of d says the same."""
    a, d = node.args[:2]
    if not isinstance(a, Node) or not isinstance(d, Node) or (packet(node) is aten.div and len(node.kwargs)):
        return None
    if packet(node) is aten.div:
        return _ratio(a, known, _Divisor(d, spread(d), 1.0)) if is_tensor(d) else None
    return next((found for x, y in ((a, d), (d, a)) if (found := _ratio(x, known, _inverse(y)))), None)


def averaged(node: Node, known: Known) -> Interval | None:
    """A sum of n numbers, or of n products, divided by n or less is an average: as large as what it is made from."""
    a, divisor = node.args[0], of(known, node.args[1])
    if not is_tensor(a):
        return None
    if packet(node) is aten.mul:
        divisor = over(exactly(1.0), divisor)
    total: Any = spread(a).node  # type: ignore[arg-type]
    count = None
    if packet(total) is aten.sum:
        count, parts = elements(total.args[0], reduced(total)), total.args[:1]
    elif packet(total) in (aten.mm, aten.bmm):
        count, parts = elements(total.args[0], [-1]), total.args[:2]
    if count is None or not nonnegative(divisor.lower) or not nonnegative(count - divisor.upper):
        return None
    return Interval(*ANYWHERE, any(known[part].vanishing for part in parts))


def weighted(node: Node, known: Known) -> Interval | None:
    """A product with a softmax, probabilities that sum to 1 over the inner dimension: a mean of the other operand."""
    left, right = node.args[:2]
    place = spread(left)  # type: ignore[arg-type]
    if packet(place.node) is not aten.div or not is_tensor(place.node.args[1]):
        return None
    e, below = place.node.args[:2]
    total: Any = spread(below).node  # type: ignore[arg-type]
    rows = packet(total) is aten.sum and same(total.args[0], e) and nonnegative(known[e].lower)  # type: ignore[index]
    last = place.node.meta["val"].dim() - 1
    if not rows or reduced(total) != [last] or not is_laid_along(spread(below).shape, total, [last]):  # type: ignore[arg-type]
        return None
    if elements(left, [-1]) != elements(place.node, [-1]):
        return None
    error = place.error + 2.0**-10  # of two sums, (BLOCK + 64) 2^-24 each, and their quotient
    return enlarged(hull([ZERO, of(known, right)]), error)


def gate(node: Node, known: Known) -> Interval | None:
    """1 / (1 + exp(-x)) and x / (1 + exp(-x)): near 0 because the gate is shut; their absolute accuracy counts."""
    top, below = (1.0, node.args[0]) if packet(node) is aten.reciprocal else node.args[:2]
    below = original(below)
    terms = below.args[:2] if packet(below) is aten.add else ()
    if 1 in terms and any(packet(term) is aten.exp for term in terms):
        return Interval(*ANYWHERE, isinstance(top, Node) and known[top].vanishing)
    return None


RELATIONS: dict[object, tuple[Callable[[Node, Known], Interval | None], ...]] = {
    aten.mul: (square, quotient, averaged),
    aten.div: (quotient, averaged, gate),
    aten.reciprocal: (gate,),
    aten.mm: (weighted,),
    aten.bmm: (weighted,),
    aten.sub: (shifted,),
    aten.exp: (exponential,),
    aten.sum: (counted,),
}


class _Divisor(NamedTuple):
    """What a quotient divides by: ``spread`` to the power of ``power``."""

    node: Node
    spread: Spread
    power: float


def _ratio(a: Node, known: Known, divisor: _Divisor | None) -> Interval | None:
    """a / y^c is within K^c if |a|^(1/c) <= K y; it vanishes only if ``a`` does and an epsilon keeps y from doing so too."""
    if divisor is None or not is_tensor(a):
        return None
    factor = _factor(a, 1 / divisor.power, divisor.spread, known) ** divisor.power
    if math.isinf(factor):
        return None
    lower = 0.0 if nonnegative(known[a].lower) else -factor
    return Interval(lower, factor, known[a].vanishing and positive(known[divisor.node].lower))


def _inverse(node: Node) -> _Divisor | None:
    """y and c where ``node`` is y^-c."""
    if not is_tensor(node):
        return None
    found = spread(node)
    powers = {aten.rsqrt: 0.5, aten.reciprocal: 1.0}
    power = powers.get(packet(found.node), 0.0)  # type: ignore[call-overload]
    if packet(found.node) is aten.pow and isinstance(found.node.args[1], (int, float)):
        power = -found.node.args[1]
    if power <= 0:
        return None
    below = found.node.args[0]
    assert isinstance(below, Node)
    error = (1 + found.error + ulp(found.node)) ** (1 / power) - 1
    place = spread(below, found.shape, found.reshaped)
    return _Divisor(below, place._replace(error=place.error + error), power)


def _factor(a: Node, p: float, place: Spread, known: Known) -> float:
    """K with |a|^p <= K y for what ``place`` repeats; infinite where none is found. Roundings on the way enlarge it."""
    y, error = place.node, 1 + 2 * (place.error + ulp(place.node))

    def below(argument: object, p: float) -> float:
        if not is_tensor(argument):
            return math.inf
        return _factor(a, p, spread(argument, place.shape, place.reshaped), known)  # type: ignore[arg-type]

    if packet(y) in (aten.add, aten.maximum, aten.clamp_min, aten.clamp):
        if packet(y) is aten.clamp and argument(y, 2, "max") is not None:
            return math.inf
        terms = y.args[:2] if packet(y) in (aten.add, aten.maximum) else y.args[:1]
        sums = packet(y) is aten.add
        kept = [
            below(t, p) for t, u in zip(terms, reversed(terms), strict=True) if not sums or _is_nonnegative(u, known)
        ]
        return error * min(kept, default=math.inf) if not y.kwargs else math.inf
    if packet(y) is aten.sqrt:
        return error * math.sqrt(below(y.args[0], 2 * p))
    if packet(y) is aten.pow and isinstance(y.args[1], (int, float)) and y.args[1] > 0:
        return error * float(below(y.args[0], p / y.args[1]) ** y.args[1])
    return error * _reduction_factor(a, p, place, known)


def _reduction_factor(a: Node, p: float, place: Spread, known: Known) -> float:
    """K for a reduction: 1 for a sum or a maximum of |a|^p, n for a mean, and for a variance where a = x - mean(x)."""
    y = place.node
    if packet(y) is private.getitem and packet(y.args[0]) is aten.var_mean and y.args[1] == 0:
        y = y.args[0]  # type: ignore[assignment]
    variance = packet(y) in (aten.var_mean, aten.var) and isinstance(correction(y), (int, float))
    if not variance and packet(y) not in (aten.sum, aten.mean, aten.amax):
        return math.inf
    dims = reduced(y)
    if not is_laid_along(place.shape, y, dims):
        return math.inf
    matches = p == 2 and _is_centred(a, y, dims) if variance else _is_power(y.args[0], a, p, known)
    count = at_most(elements(y.args[0], dims)) if variance or packet(y) is aten.mean else 1.0
    return count * (1 + 2.0**-11) if matches else math.inf  # more than the error of a sum: (BLOCK + 64) 2^-24


def _is_power(q: Any, a: Node, p: float, known: Known) -> bool:
    """Whether ``q`` is |a|^p."""
    q = original(q)
    if p == 1:
        return (same(q, a) and nonnegative(known[a].lower)) or (packet(q) is aten.abs and same(q.args[0], a))
    if p != 2:
        return False
    if packet(q) is aten.mul:
        return same(q.args[0], a) and same(q.args[1], a)
    return packet(q) is aten.pow and q.args[1] == 2 and same(q.args[0], a)


def _is_centred(a: Node, variance: Node, dims: list[int]) -> bool:
    """Whether ``a`` is x - mean(x) for the mean that ``variance`` returns: (x - mean)^2 <= n var.

    Rounding the mean shifts both sides alike, since a variance is summed about the mean computed with it.
    """
    centred = original(a)
    if packet(centred) is not aten.sub or centred.kwargs or not is_tensor(centred.args[1]):
        return False
    mean = spread(centred.args[1])
    of_both = packet(mean.node) is private.getitem and mean.node.args == (variance, 1) and not mean.error
    exact = of_both and bits_of(mean.node.meta["val"].dtype) == 24
    return exact and same(centred.args[0], variance.args[0]) and is_laid_along(mean.shape, variance, dims)


def _is_nonnegative(term: object, known: Known) -> bool:
    return nonnegative(known[term].lower) if isinstance(term, Node) else isinstance(term, (int, float)) and term >= 0
