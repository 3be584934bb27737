"""Residual sums: what a checkpointed block normalises second, made again from codes of its input.

    x --norm--> y --matmuls, attention--> f(y);   x1 = x + f(y);   norm(x1)

x may be codes: a norm reads it. Then x1 is off by the error of x, which the second norm divides by the size of x1. So the
error counts relative to a sum, which might cancel. What keeps it from that is an argument of size, as for the logits of
attention, and not a proof: f sees x through a norm, so the size of f is that of weights, whatever the size of x. A row of x1
is small beside x only where f is as large as x and of the opposite direction. There the block itself multiplies its gradient
by |x| / |x1|, and the rounding of x to its own dtype by as much. ``benchmarks/studies/residual_sizes.py`` measures that.

Left out: a sum whose other operand has not been through a norm *and* a matmul (a norm's gain alone, of one large weight,
scales one channel), and one that scales x. What that norm reads is x or such a sum: else it is no sum of codes itself.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import Node

from fp8compile.analysis.norms import itself
from fp8compile.analysis.ranges.matching import packet
from fp8compile.analysis.sensitivity import responses as R
from fp8compile.fx.graph import computed_from_any
from fp8compile.fx.ops import is_attention

Question = Callable[[Node], bool]


def is_residual_sum(node: Node, used: Node, normalises: Question) -> bool:
    """Whether a value is a saved one plus functions of it that begin with a norm and hold a matmul.

    Args:
        node: a value of the backward.
        used: the placeholder of the saved value.
        normalises: whether a node of the backward is what a norm makes of its operand.
    """
    return _Sum(used, normalises).is_of(node)


class _Sum:
    def __init__(self, used: Node, normalises: Question) -> None:
        self.used, self.normalises = used, normalises
        self.dependent = computed_from_any([used])
        self._known: dict[tuple[Node, bool], bool] = {}

    def is_of(self, node: Node) -> bool:
        """Whether ``node`` is x + f(norm(x)), or such a sum plus one more."""
        node = itself(node)
        if packet(node) not in R.ADDITIONS - R.NEGATIONS or node.kwargs or len(node.all_input_nodes) != 2:
            return False
        a, b = node.all_input_nodes
        return any(self._is_stream(x) and self._passes(f, mixed=True) for x, f in ((a, b), (b, a)))

    def _is_stream(self, node: Node) -> bool:
        return itself(node) is self.used or self.is_of(node)

    def _passes(self, node: Node, mixed: bool) -> bool:
        """Whether every way from x to a value computed from it passes a norm, and behind that a matmul if ``mixed``."""
        if (node, mixed) not in self._known:
            self._known[node, mixed] = self._found(node, mixed)
        return self._known[node, mixed]

    def _found(self, node: Node, mixed: bool) -> bool:
        if node is self.used or node not in self.dependent:
            return False
        if not mixed and self.normalises(node):
            return True
        still = mixed and not (packet(node) in R.CONTRACTIONS or is_attention(node))
        read = [n for n in node.all_input_nodes if n in self.dependent]
        return all(self._passes(n, still) for n in read)
