"""Numbers change by one rounding in FP32. A SiLU beside its own gradient takes the sigmoid that the gradient takes.

    silu = x / (1 + exp(-x))                        silu = x * sigmoid(x)
    s = sigmoid(x)                          ->      s = sigmoid(x)
    gradient = g * s * (1 + x * (1 - s))            gradient = g * s * (1 + x * (1 - s))

A gated MLP's backward needs both, for each element of its widest values: the SiLU, which is computed again, for the gradient
of what it gates and for the wgrad behind it, and the SiLU's gradient. torch decomposes one to a quotient and the other to a
sigmoid (``torch/_decomp/decompositions.py``), each with an exponential and a division of its own, and a kernel that makes
codes of what it computes is bound by its instructions. Inductor computes one sigmoid where a kernel has two of one value.

Let s = (1 + d) / (1 + exp(-x)). Then x * s is rounded once more than x * (1 + d) / (1 + exp(-x)) is: relative to SiLU it is
off by d and by one rounding, 2 ** -24. Below x = -87 the sigmoid is smaller than FP32 holds to all its places, and the result
is off by at most |x| * 2 ** -126; the quotient becomes 0 from -89 on too. Where x is infinite or NaN both are the same.

Left as they are: quotients without such a sigmoid, as in a forward, which computes what the model says; other dtypes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fp8compile.fx.graph import is_tensor, splice
from fp8compile.fx.ops import is_pointwise, is_view
from fp8compile.recipe.context import Context
from fp8compile.reporting.entries import Notes

aten = torch.ops.aten
# 1 + exp(-x) from the outside: each operation with its arguments beside the first.
DENOMINATOR = ((aten.add.Tensor, (1,)), (aten.exp.default, ()), (aten.neg.default, ()))
DECODED = 12  # operations at most, of each of which a value may have a copy


def share_sigmoids(graph: Graph, ctx: Context) -> Notes:
    """Compute each SiLU of a value whose sigmoid is computed too as their product."""
    if not ctx.recipe.rewrites_graph:
        return Notes()
    values = [node.args[0] for node in graph.find_nodes(op="call_function", target=aten.sigmoid.default)]
    quotient: Any
    for quotient in graph.find_nodes(op="call_function", target=aten.div.Tensor) if values else ():
        if _is_silu(quotient) and any(_is_same(quotient.args[0], value) for value in values):
            silu = splice(graph, _silu, quotient.args[0], before=quotient)
            quotient.replace_all_uses_with(silu)
            _erase(graph, quotient)
    return Notes()


def _silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def _is_silu(quotient: Any) -> bool:
    """Whether a node is x / (1 + exp(-x)) of an FP32 value."""
    x, node = quotient.args
    for target, rest in DENOMINATOR:
        if not isinstance(node, Node) or node.target is not target or node.args[1:] != rest:
            return False
        node = node.args[0]
    return node is x and is_tensor(quotient) and x.meta["val"].dtype == quotient.meta["val"].dtype == torch.float32


def _is_same(a: Any, b: Any, most: int = DECODED) -> bool:
    """Whether two arguments are one value: a node, or copies of it. Each reader of a saved value has a decode of its own."""
    if not isinstance(a, Node) or not isinstance(b, Node):
        return type(a) is type(b) and a == b
    if a is b:
        return True
    if most == 0 or a.target is not b.target or a.kwargs != b.kwargs or not (is_pointwise(a) or is_view(a)):
        return False
    return len(a.args) == len(b.args) and all(_is_same(x, y, most - 1) for x, y in zip(a.args, b.args, strict=True))


def _erase(graph: Graph, quotient: Any) -> None:
    """Erase a SiLU that nothing reads, with what it alone reads of its denominator."""
    unread = [quotient, *(quotient.args[1:])]
    while len(unread) <= len(DENOMINATOR):
        unread.append(unread[-1].args[0])
    for node in unread:
        if not node.users:
            graph.erase_node(node)
