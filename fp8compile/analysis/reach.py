"""Which uses a value reaches through operations that keep what it is: its zeros, its layout, its part in a sum.

For rules that choose between sound formats (saved/format.py) or look for an operation under views (islands/policy.py).
Whether a value may be rounded at all is another question: sensitivity/.
"""

from __future__ import annotations

from collections.abc import Callable, Set

import torch
from torch.fx import Node

from fp8compile.fx.graph import is_tensor
from fp8compile.fx.ops import CASTS, VIEWS

aten, prims = torch.ops.aten, torch.ops.prims

LAYOUT = VIEWS | {*CASTS, aten.clone.default, aten.cat.default}
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
