"""Rules of operations that work element by element, or move elements: the range of the result from those of the arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from fp8compile import _torch as private
from fp8compile.analysis.ranges.bounds import at_least, at_most, greatest, nonnegative, positive
from fp8compile.analysis.ranges.interval import (
    ANYTHING,
    ZERO,
    Interval,
    add,
    between,
    enlarged,
    exactly,
    hull,
    monotone,
    negated,
    over,
    squared,
    times,
)
from fp8compile.analysis.ranges.matching import Known, argument, elements, of, packet, reduced
from fp8compile.numerics.formats import FP16_NORMAL

aten, prims = torch.ops.aten, torch.ops.prims
Rule = Callable[[Node, Known], Any]


def of_dtype(dtype: torch.dtype) -> Interval:
    """All finite numbers of a dtype."""
    if dtype == torch.bool:
        return Interval(0.0, 1.0)
    if dtype.is_complex:
        return ANYTHING
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return Interval(float(info.min), float(info.max))


def input_range(node: Node) -> Interval:
    """An input is finite; a constant is what it is."""
    value = node.meta.get("val")
    constant: Any = getattr(node.graph.owning_module, str(node.target), None) if node.op == "get_attr" else None
    if type(constant) in (torch.Tensor, torch.nn.Parameter) and constant.numel():
        with (
            private.unset_fake_temporarily()
        ):  # a graph is partitioned under its fake mode; the constant is a real tensor
            return between(float(constant.detach().min()), float(constant.detach().max()))
    return of_dtype(value.dtype) if isinstance(value, torch.Tensor) else ANYTHING


def unary(f: Callable[[Interval], Interval]) -> Rule:
    return lambda node, known: f(of(known, node.args[0]))


def binary(f: Callable[[Interval, Interval], Interval]) -> Rule:
    return lambda node, known: f(of(known, node.args[0]), of(known, node.args[1]))


def within(lower: float, upper: float) -> Rule:
    return lambda node, known: Interval(lower, upper)


def increasing(f: Callable[[float], float], keeps_small: bool = True) -> Rule:
    """An increasing function; ``keeps_small``: f(x) is as small as x."""
    return unary(lambda x: monotone(x, f, x.vanishing and keeps_small))


def first(node: Node, known: Known) -> Interval:
    """Elements of the first argument, moved, repeated or left out."""
    return of(known, node.args[0])


def parts(node: Node, known: Known) -> tuple[Interval, ...]:
    return (of(known, node.args[0]),) * len(node.meta["val"])


def picked(node: Node, known: Known) -> Interval:
    """One of several results."""
    whole, index = known.get(node.args[0]), node.args[1]  # type: ignore[arg-type]
    return whole[index] if isinstance(whole, tuple) and index < len(whole) else ANYTHING  # type: ignore[operator,index]


def joined(node: Node, known: Known) -> Interval:
    return hull(of(known, x) for x in node.args[0])  # type: ignore[union-attr]


def any_of(*places: int) -> Rule:
    """An element of one of these arguments."""
    return lambda node, known: hull(of(known, node.args[i]) for i in places)


def padded(node: Node, known: Known) -> Interval:
    return hull([of(known, node.args[0]), of(known, argument(node, 2, "value", 0.0))])


def filled(index: int) -> Rule:
    return lambda node, known: of(known, node.args[index])


def counting(node: Node, known: Known) -> Interval:
    """start, start + step, ...: prims.iota(length)."""
    start, step, length = node.kwargs["start"], node.kwargs["step"], of(known, node.args[0])
    return hull([of(known, start), add(of(known, start), times(of(known, step), add(length, exactly(-1.0))))])


def added(node: Node, known: Known, sign: float = 1.0) -> Interval:
    alpha = exactly(sign * float(node.kwargs.get("alpha", 1)))  # type: ignore[arg-type]
    return add(of(known, node.args[0]), times(of(known, node.args[1]), alpha))


def subtracted(node: Node, known: Known) -> Interval:
    return added(node, known, -1.0)


def divided(node: Node, known: Known) -> Interval:
    x = over(of(known, node.args[0]), of(known, node.args[1]))
    if node.kwargs.get("rounding_mode") is None:
        return x
    return Interval(at_least(x.lower) - 1, at_most(x.upper) + 1)


def fused(node: Node, known: Known) -> Interval:
    """a b + c."""
    a, b, c = (of(known, x) for x in node.args[:3])
    return add(times(a, b), c)


def absolute(x: Interval) -> Interval:
    if nonnegative(x.lower):
        return x
    if nonnegative(-x.upper):
        return negated(x)
    return between(0.0, greatest([-x.lower, x.upper]), x.vanishing)


def larger(x: Interval, y: Interval) -> Interval:
    vanishing = (x.vanishing or y.vanishing) and not (positive(at_least(x.lower)) or positive(at_least(y.lower)))
    return between(greatest([x.lower, y.lower]), greatest([x.upper, y.upper]), vanishing)


def smaller(x: Interval, y: Interval) -> Interval:
    return negated(larger(negated(x), negated(y)))


def clamped(node: Node, known: Known) -> Interval:
    x, low, high = of(known, node.args[0]), argument(node, 1, "min"), argument(node, 2, "max")
    x = x if low is None else larger(x, of(known, low))
    return x if high is None else smaller(x, of(known, high))


def reciprocal(x: Interval) -> Interval:
    return over(exactly(1.0), x)


def rsqrt(x: Interval) -> Interval:
    return reciprocal(root(x))


def root(x: Interval) -> Interval:
    return monotone(x, math.sqrt, x.vanishing) if nonnegative(x.lower) else ANYTHING


def exponential(x: Interval) -> Interval:
    return monotone(x, math.exp, at_least(x.lower) < math.log(FP16_NORMAL))


def exponential2(x: Interval) -> Interval:
    return monotone(x, lambda e: 2.0**e, at_least(x.lower) < math.log2(FP16_NORMAL))


def power(node: Node, known: Known) -> Interval:
    """x^n for a number n; n^x for n > 0 is exp2(x log2(n)); of two tensors, nothing is proven."""
    base, exponent = node.args[:2]
    if isinstance(exponent, (int, float)):
        return raised(of(known, base), float(exponent))
    if isinstance(base, (int, float)) and base > 0:
        return exponential2(times(of(known, exponent), exactly(math.log2(base))))
    return ANYTHING


def raised(x: Interval, n: float) -> Interval:
    """x^n: even, odd or fractional; for n < 0 one over x^-n."""
    if n < 0:
        return reciprocal(raised(x, -n))
    if n == 2:
        return squared(x)
    if n == int(n) and n % 2 == 0:
        x = absolute(x)
    if n != int(n) and not nonnegative(x.lower):
        return ANYTHING
    return monotone(x, lambda v: float(v**n), x.vanishing)


def extreme(node: Node, known: Known) -> Any:
    """Of one tensor, some of its elements (and where they were); of two, the larger or smaller of each pair."""
    if isinstance(argument(node, 1, "other"), Node):
        return (larger if packet(node) is aten.max else smaller)(of(known, node.args[0]), of(known, node.args[1]))
    x = of(known, node.args[0])
    return (x, place(node, known)) if isinstance(node.meta["val"], (tuple, list)) else x


def cast(node: Node, known: Known) -> Interval:
    """The same number, or for integers what is left without its fraction."""
    x = of(known, node.args[0])
    return x if node.meta["val"].dtype.is_floating_point else monotone(x, math.trunc, False)


def dropped(node: Node, known: Known) -> tuple[Interval, Interval]:
    """x / (1 - p), or 0."""
    kept = exactly(1 - float(node.args[1]))  # type: ignore[arg-type]
    return hull([ZERO, of(known, node.args[0]), over(of(known, node.args[0]), kept)]), Interval(0.0, 1.0)


def attended(node: Node, known: Known) -> tuple[Interval, ...]:
    """A mean of values, weighted by probabilities; 0 where a row is masked altogether."""
    dropout = [p for p in (*node.args[3:], node.kwargs.get("dropout_p")) if type(p) is float and p > 0]
    mean = hull([ZERO, of(known, node.args[2])])
    out = ANYTHING if dropout else enlarged(mean, 2.0**-7)  # probabilities are rounded to the dtype of the values
    return (out, *((ANYTHING,) * (len(node.meta["val"]) - 1)))


def scattered(node: Node, known: Known) -> Interval:
    """What was there, or what is put there; of sums, nothing is proven."""
    if "reduce" in node.kwargs or (packet(node) is aten.index_put and argument(node, 3, "accumulate")):
        return ANYTHING
    return hull([of(known, node.args[0]), of(known, node.args[3 if packet(node) is aten.scatter else 2])])


def places(node: Node, dims: Sequence[int]) -> Interval:
    """Where elements of the first argument were, counted over ``dims``."""
    return between(0.0, add(exactly(elements(node.args[0], dims)), exactly(-1.0)).upper)


def place(node: Node, known: Known) -> Interval:
    """Where the largest or smallest element was: along a dimension, or in the whole tensor."""
    return places(node, reduced(node))


def sorted_(at: int) -> Rule:
    """Some elements of the first argument, and where they were along ``dim``, argument ``at``; the last by default."""
    return lambda node, known: (of(known, node.args[0]), places(node, [argument(node, at, "dim", -1)]))


def pooled(node: Node, known: Known) -> tuple[Interval, Interval]:
    """Some elements of the first argument, and where they were in their plane."""
    return of(known, node.args[0]), places(node, (-2, -1))


def pooled_by_window(node: Node, known: Known) -> tuple[Interval, Interval]:
    """Some elements of the first argument, and where they were in their window, which may be larger than the plane."""
    return of(known, node.args[0]), ANYTHING


def drawn(node: Node, known: Known) -> Interval:
    return Interval(0.0, 1.0) if "randn" not in node.args else ANYTHING


def sine(x: Interval) -> Interval:
    return between(max(-1.0, -x.amax), min(1.0, x.amax), x.vanishing)


def gate(v: float) -> float:
    return math.exp(v) / (1 + math.exp(v)) if v < 0 else 1 / (1 + math.exp(-v))
