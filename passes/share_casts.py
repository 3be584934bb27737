"""Numbers stay as they are. A value that is cast to a dtype several times is cast once.

Autocast casts the input of every linear by itself, so q, k and v would each encode a copy of the same tensor, and the
backward would keep each. Legality: casts are pure; the first one in the graph serves all. A checkpointed region
keeps casts of its own: what an earlier region has cast would be saved for a later one.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from fp8compile.fx.aot import is_training
from fp8compile.fx.checkpointed import region_of
from fp8compile.fx.ops import CAST
from fp8compile.recipe.context import Context
from fp8compile.reporting.entries import Notes


def share_casts(graph: Graph, ctx: Context) -> Notes:
    """Let the first cast of a value to a dtype serve all others."""
    if not ctx.recipe.quantizes_linears or not is_training(graph):
        return Notes()  # there are no linears to rewrite
    first: dict[tuple[object, ...], Node] = {}
    for node in graph.find_nodes(op="call_function", target=CAST):
        same = first.setdefault((region_of(node), node.args), node)
        if same is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    return Notes()
