"""Numbers stay as they are but for one rounding of a 16-bit term. A sum's ``alpha`` becomes a multiplication of its own.

    add(a, b, alpha=c)    becomes    add(a, mul(b, c))        where a matmul's result is in ``a`` or ``b``

Inductor's pattern matcher leaves out of account what a pattern does not name, and patterns of sums do not name ``alpha``.
So ``add(a, mm(x, w), alpha=c)`` becomes ``addmm(a, x, w)``, and attention with a mask times ``c`` has the mask itself
(seen in torch 2.13; tests/test_canary_patterns.py says when that is mended). Lowered, a sum with ``alpha`` is these two
operations in one kernel anyway.

Left as they are: sums that no matmul's result reaches through views and pointwise operations; no such pattern begins there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fp8compile.fx.graph import SPLICED, splice
from fp8compile.fx.ops import computed_from, is_matmul
from fp8compile.recipe.context import Context
from fp8compile.reporting.entries import Notes

ADD = torch.ops.aten.add.Tensor
OWN = (
    "val",
    "tensor_meta",
    "eager_input_vals",
    SPLICED,
)  # what is not to be said of the operations that a sum becomes


def spell_out_alpha(graph: Graph, ctx: Context) -> Notes:
    """Multiply what is added by ``alpha``, wherever a pattern might lose it. All recipes: it is Inductor's fault."""
    for node in graph.find_nodes(op="call_function", target=ADD):
        alpha = node.kwargs.get("alpha", 1)
        if (isinstance(alpha, Node) or alpha != 1) and any(map(is_matmul, computed_from(node))):
            _spell_out(graph, node)
    return Notes()


def _spell_out(graph: Graph, node: Node) -> None:
    dtype = node.meta["val"].dtype
    given: tuple[Any, ...] = (*node.args, node.kwargs["alpha"])

    def scaled_and_added(*values: Any) -> Tensor:
        left = iter(values)
        a, b, alpha = (next(left) if isinstance(each, Node) else each for each in given)
        total: Tensor = a + (b.to(dtype) if isinstance(b, Tensor) else b) * alpha
        return total

    known = set(graph.nodes)
    nodes = [each for each in given if isinstance(each, Node)]
    total: Node = splice(graph, scaled_and_added, *nodes, before=node)
    meta = {key: value for key, value in node.meta.items() if key not in OWN}
    for new in set(graph.nodes) - known:  # the user's operation still: of its layer, region and half
        new.meta |= meta
        del new.meta[SPLICED]
    node.replace_all_uses_with(total)
    graph.erase_node(node)
