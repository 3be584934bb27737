"""Statistics: values made of a reduction's result, each a number that a whole row, or channel, depends on."""

from __future__ import annotations

from torch import Tensor
from torch.fx import Node

from fp8compile import _torch as private
from fp8compile.fx.graph import is_tensor, numel
from fp8compile.fx.ops import FUSED_NORMS, STATISTICS, is_attention, opname


def is_statistic(made: Node) -> bool:
    """Whether a value is a pointwise function of a reduction's result, of that result's own size."""
    node, size = made, numel(made.meta["val"])
    while node.op == "call_function":
        parent = node.args[0] if node.args else None
        if node.target is private.getitem and isinstance(parent, Node) and _gives_statistics(parent):
            return bool(node.args[1] != 0)  # the first is the result of attention or of a norm
        if opname(node) in STATISTICS:
            return _largest_operand(node) > size
        same = [n for n in node.all_input_nodes if not is_tensor(n) or numel(n.meta["val"]) == size]
        if not same:
            return False
        node = same[0]
    return False


def _gives_statistics(node: Node) -> bool:
    return is_attention(node) or opname(node) in FUSED_NORMS


def _largest_operand(node: Node) -> int:
    return max(
        (numel(n.meta["val"]) for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)), default=0
    )
