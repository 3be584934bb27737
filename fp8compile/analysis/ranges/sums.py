"""The rules of reductions and matmuls: n or k elements make one. See ``summed`` in interval.py for their rounding."""

from __future__ import annotations

from torch.fx import Node

from fp8compile.analysis.ranges.bounds import at_least, at_most
from fp8compile.analysis.ranges.interval import (
    ANYTHING,
    ZERO,
    Interval,
    add,
    between,
    enlarged,
    exactly,
    hull,
    numeric,
    over,
    sum_error,
    summed,
    times,
)
from fp8compile.analysis.ranges.matching import Known, correction, elements, of, reduced


def total(node: Node, known: Known) -> Interval:
    return summed(of(known, node.args[0]), elements(node.args[0], reduced(node)))


def averaged(node: Node, known: Known) -> Interval:
    x = of(known, node.args[0])
    return enlarged(x, sum_error(elements(node.args[0], reduced(node)), x))


def variance(node: Node, known: Known) -> Interval:
    """At most half the width, squared (Popoviciu), times n / (n - correction).

    The computed mean is off by e times the greatest magnitude, e being the error of a sum; the deviation is off by no more.
    """
    x, n, less = numeric(of(known, node.args[0])), elements(node.args[0], reduced(node)), correction(node)
    if not isinstance(less, (int, float)) or at_least(n) <= less:
        return ANYTHING
    error = sum_error(n)
    deviation = (at_most(x.upper) - at_least(x.lower)) / 2 + error * x.amax
    return between(0.0, deviation * deviation * (1 + 4 * error) * at_least(n) / (at_least(n) - less), x.vanishing)


def variance_and_mean(node: Node, known: Known) -> tuple[Interval, Interval]:
    return variance(node, known), averaged(node, known)


def accumulated(node: Node, known: Known) -> Interval:
    """Sums of the first 1, 2, ... n. A scan may add all in a row; each addition errs by no more than what it adds."""
    x, n = of(known, node.args[0]), elements(node.args[0], [node.args[1]])
    return enlarged(times(x, Interval(1.0, n)), min((at_most(n) + 1) * 2.0**-24, 1.0))


def matmul(node: Node, known: Known, a: int = 0) -> Interval:
    """Sums of k products, k the inner dimension."""
    left, right = node.args[a : a + 2]
    return summed(times(of(known, left), of(known, right)), elements(left, [-1]))


def product_and_sum(node: Node, known: Known) -> Interval:
    """beta c + alpha a b; c may be what the sum starts from."""
    beta, alpha = (exactly(float(node.kwargs.get(name, 1))) for name in ("beta", "alpha"))  # type: ignore[arg-type]
    start = enlarged(of(known, node.args[0]), sum_error(elements(node.args[1], [-1])))
    return add(times(start, beta), times(matmul(node, known, 1), alpha))


def convolved(node: Node, known: Known) -> Interval:
    """Sums of one product per input channel of a group and element of the kernel, or fewer where padding is."""
    x, weight, bias, *_, transposed, _, groups = node.args
    rank = weight.meta["val"].dim()  # type: ignore[union-attr]
    k = exactly(elements(weight, [0 if transposed else 1, *range(2, rank)]))
    k = over(k, exactly(float(groups))) if transposed else k  # type: ignore[arg-type]
    result = hull([ZERO, summed(times(of(known, x), of(known, weight)), k.upper)])
    start = enlarged(of(known, bias), sum_error(k.upper)) if isinstance(bias, Node) else ZERO
    return add(result, start)
