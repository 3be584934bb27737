"""Bounds of ranges: a number, or an expression in the sizes of dynamic shapes.

A sum over s0 elements of at most R is at most R s0, and that divided by s0 is at most R again. A bound that cannot be decided
for all sizes is replaced by a number that encloses it. Where no size is symbolic, all of this is plain floats.
"""

from __future__ import annotations

import math
from typing import TypeAlias, cast

import sympy
import torch

from fp8compile._torch import bound_sympy

Bound: TypeAlias = float | sympy.Expr


def at_least(bound: Bound) -> float:
    """A number that the bound is never below."""
    return bound if isinstance(bound, float) else _numbers(bound)[0]


def at_most(bound: Bound) -> float:
    """A number that the bound is never above."""
    return bound if isinstance(bound, float) else _numbers(bound)[1]


def positive(bound: Bound) -> bool:
    """Whether the bound is known to be positive for all sizes."""
    return bound > 0 if isinstance(bound, float) else bool(bound.is_positive)


def nonnegative(bound: Bound) -> bool:
    return bound >= 0 if isinstance(bound, float) else bool(bound.is_nonnegative)


def least(bounds: list[Bound]) -> Bound:
    if all(type(b) is float for b in bounds):
        return min(cast(list[float], bounds))
    return -greatest([-b for b in bounds])


def greatest(bounds: list[Bound]) -> Bound:
    """The greatest of ``bounds``; where that depends on sizes, a number that is above them all."""
    if all(type(b) is float for b in bounds):
        return max(cast(list[float], bounds))
    found = bounds[0]
    for other in bounds[1:]:
        if math.inf in (found, other):
            found = math.inf
        elif -math.inf in (found, other):
            found = other if found == -math.inf else found
        elif not (found == other or nonnegative(found - other)):
            found = other if nonnegative(other - found) else max(at_most(found), at_most(other))
    return found


def size(value: int | torch.SymInt | torch.SymFloat) -> Bound:
    """A size as a bound: a number, or the expression of a symbolic one."""
    if isinstance(value, int):
        return float(value)
    expression = value.node.expr
    return float(expression) if expression.is_number else expression


def _numbers(expression: sympy.Expr) -> tuple[float, float]:
    """The least and greatest value of an expression over the sizes that torch's shape environment allows."""
    bounds = bound_sympy(expression)
    return _float(bounds.lower), _float(bounds.upper)


def _float(x: object) -> float:
    try:
        return float(x)  # type: ignore[arg-type]
    except OverflowError:  # torch's infinite integer
        return math.inf if x > 0 else -math.inf  # type: ignore[operator]


def simple(x: Bound) -> Bound:
    return x if isinstance(x, float) or not x.is_number else float(x)


def has_sign(bound: Bound) -> bool:
    return isinstance(bound, float) or nonnegative(bound) or nonnegative(-bound)
