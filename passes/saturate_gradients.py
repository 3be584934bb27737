"""Numbers change only where a loss scaler asks for it at run time: FP16 gradients are clipped to +-65504, not left at inf.

Graphcore's automatic loss scaling clips and never skips a step. The limit is an extra input of the graph, a tensor that is
inf, which clips nothing, until a scaler in histogram mode sets it (see fp8compile/slot.py). What is clipped is what is
observed; statistics are taken before. NaN stays NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fp8compile.context import Context
from fp8compile.flow import is_training
from fp8compile.graph import SPLICED, place_after, splice
from fp8compile.numerics.histogram import saturate
from fp8compile.observable import BACKWARD, observable
from fp8compile.report import Notes


def saturate_gradients(graph: Graph, ctx: Context) -> Notes:
    """Clip every observed FP16 gradient to the graph's limit."""
    if ctx.extra is None or not is_training(graph) or (limit := ctx.input_at(graph, ctx.extra.limit)) is None:
        return Notes()
    if limit.users:
        return Notes()  # it has run before
    for value in observable(graph, ctx):
        if value.direction == BACKWARD and value.node.meta["val"].dtype == torch.float16:
            _clip(value.node, limit)
    return Notes()


def _clip(node: Node, limit: Node) -> None:
    def clipped(x: Tensor, limit: Tensor) -> Tensor:
        return saturate(x, limit)

    users = [user for user in node.users if not _takes_statistics(user)]
    new: Node = splice(node.graph, clipped, node, limit, before=place_after(node))
    for user in users:
        user.replace_input_with(node, new)


def _takes_statistics(user: Node) -> bool:
    return str(user.meta.get(SPLICED, "")).startswith("statistics(")
