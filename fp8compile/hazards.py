"""Uses in the backward that a rounded value would spoil: what must not be read from a code.

A code is off by a few per cent and may flush a tiny value to zero. Most derivatives do not mind; three uses do:
  * exponentiated      exp(x): a relative error of x becomes an absolute error of the exponent (a softmax recomputed from
                       its input: 3 % of a logit of 10 is a factor of 1.35). Bounded functions written with exp (silu,
                       sigmoid, softplus, mish, elu) are safe: their slope is bounded.
  * divided by         1/x, rsqrt, log, negative powers: a tiny value that flushed to zero becomes an infinity.
  * compared for equality   eq, ne, sort, argmax ...: max-style backwards find their element by x == amax(x).
"""

from __future__ import annotations

from collections.abc import Callable, Set

import torch
from torch.fx import Node

from fp8compile.graph import VIEWS, is_tensor

aten, prims = torch.ops.aten, torch.ops.prims

LAYOUT = VIEWS | {aten.clone.default, prims.convert_element_type.default, aten._to_copy.default, aten.cat.default}
LINEAR = LAYOUT | {
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.mul.Tensor,
    aten.div.Tensor,
    aten.neg.default,
    aten.where.self,
}
ZERO_KEEPING = LAYOUT | {aten.mul.Tensor, aten.neg.default, aten.abs.default, aten.sqrt.default, aten.div.Tensor}

EXPONENTS = {aten.exp.default, aten.exp2.default, aten.expm1.default, aten.sinh.default, aten.cosh.default}
_BOUNDED = ("silu", "sigmoid", "softplus", "mish", "elu", "gelu", "tanh", "hardswish", "swish")
_POLES = {aten.reciprocal.default, aten.rsqrt.default, aten.log.default, aten.log2.default, aten.log10.default}
_EQUALITIES = {
    aten.eq.Tensor,
    aten.eq.Scalar,
    aten.ne.Tensor,
    aten.argmax.default,
    aten.argmin.default,
    aten.sort.default,
    aten.topk.default,
    aten.floor.default,
    aten.ceil.default,
    aten.round.default,
    aten.trunc.default,
}


def spoiled_use(value: Node) -> str | None:
    """Why ``value``, a placeholder of the backward graph, must be exact there; None where rounding does no harm."""
    if reaches(value, LINEAR, lambda user, _: is_exponential(user)):
        return "exponentiated in the backward: a relative error would become an absolute one of the exponent"
    if reaches(value, ZERO_KEEPING, _is_divided_by):
        return "divided by in the backward: a value that flushed to zero would become infinite"
    if reaches(value, LINEAR, lambda user, _: user.target in _EQUALITIES):
        return "compared for equality in the backward"
    return None


def reaches(value: Node, through: Set[object], spoils: Callable[[Node, Node], bool]) -> bool:
    """Whether a use that ``spoils(user, node)`` is reached from ``value`` through the operations in ``through``."""
    seen, waiting = {value}, [value]
    while waiting:
        node = waiting.pop()
        for user in node.users:
            if spoils(user, node):
                return True
            if user.target in through and is_tensor(user) and user not in seen:
                seen.add(user)
                waiting.append(user)
    return False


def is_exponential(node: Node) -> bool:
    """Whether a node computes an exponential that the user did not write as part of a bounded function."""
    if node.target not in EXPONENTS:
        return False
    written = str(node.meta.get("original_aten", ""))
    return not any(name in written for name in _BOUNDED)


def _is_divided_by(user: Node, node: Node) -> bool:
    if user.target in _POLES:
        return True
    if user.target is aten.div.Tensor:
        return len(user.args) > 1 and user.args[1] is node
    if user.target is aten.pow.Tensor_Scalar:
        exponent = user.args[1]
        return isinstance(exponent, (int, float)) and exponent < 0
    return user.target in (aten.pow.Tensor_Tensor, aten.atan2.default)
