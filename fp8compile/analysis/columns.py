"""Where an operation leaves the columns of what it reads: the dimension of its result that has them, element for element."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import Node

from fp8compile.fx.graph import is_tensor
from fp8compile.fx.ops import RESHAPES, draws_random_numbers

aten = torch.ops.aten

# The same elements in the same order: columns that come last stay last, if their number is the same.
SAME_ELEMENTS = RESHAPES | {aten.clone.default}


def is_elementwise(node: Node) -> bool:
    """Whether a node computes each element from one element of each operand, and the same whenever it runs."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) and not draws_random_numbers(node)


def carried(node: Node, axis: Mapping[Node, int], size: int) -> int | None:
    """The dimension in which ``node`` has the columns of its wide operands, where it moves none of them; else None."""
    if not is_tensor(node):
        return None
    value, wide = node.meta["val"], [o for o in node.all_input_nodes if o in axis]
    if is_elementwise(node) or node.target is aten.expand.default:
        found = {axis[o] - o.meta["val"].dim() + value.dim() for o in wide}
    elif node.target is aten.slice_scatter.default:
        dim = node.args[2] if len(node.args) > 2 else 0
        found = {axis[o] for o in wide} | ({-1} if {axis[o] for o in wide} == {dim} else set())
    elif wide != [node.args[0] if node.args else None]:
        return None
    else:
        found = {_through(node, axis[wide[0]], wide[0].meta["val"])}
    at = found.pop() if len(found) == 1 else -1
    return at if 0 <= at < value.dim() and value.shape[at] == size else None


def _through(node: Node, at: int, operand: torch.Tensor) -> int:
    """Where a view, a copy or a padding puts dimension ``at`` of its operand; -1 where that is not known."""
    if node.target is aten.permute.default:
        dims: list[int] = node.args[1]  # type: ignore[assignment]
        return [d % operand.dim() for d in dims].index(at)
    if node.target is aten.slice.Tensor:
        dim = node.args[1] if len(node.args) > 1 else 0
        return at if isinstance(dim, int) and dim % operand.dim() != at else -1
    if node.target is aten.constant_pad_nd.default:
        pads: list[int] = node.args[1]  # type: ignore[assignment]
        own = 2 * (operand.dim() - 1 - at)
        return at if not any(pads[own : own + 2]) else -1
    if node.target in SAME_ELEMENTS and at == operand.dim() - 1:
        return int(node.meta["val"].dim()) - 1
    return -1
