"""Numbers change only where a loss scaler asks for it at run time: FP16 gradients are clipped to +-65504, not left at inf.

Graphcore's automatic loss scaling clips and never skips a step. The limit is an extra input of the graph, a tensor that is
inf, which clips nothing, until a scaler in histogram mode sets it (see fp8compile/slot.py). What is clipped is what is
observed and made by generated code, where it costs nothing: results of products are not (a copy each), nor are gradients
of parameters, which the scaler reads and writes anyway. NaN stays NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fp8compile.context import Context
from fp8compile.flow import is_training
from fp8compile.graph import place_after, splice, storage_root
from fp8compile.numerics.histogram import saturate
from fp8compile.observable import ACTIVATION, BACKWARD, leaves_a_contraction, observable
from fp8compile.report import Notes


def saturate_gradients(graph: Graph, ctx: Context) -> Notes:
    """Clip every observed FP16 gradient of an activation to the graph's limit."""
    if ctx.extra is None or not is_training(graph) or (limit := ctx.input_at(graph, ctx.extra.limit)) is None:
        return Notes()
    if limit.users:
        return Notes()  # it has run before
    for value in observable(graph, ctx):
        root = storage_root(value.node)
        of_activation = value.kind == ACTIVATION and value.direction == BACKWARD
        if of_activation and root.meta["val"].dtype == torch.float16 and not leaves_a_contraction(root):
            _clip(root, limit)
    return Notes()


def _clip(node: Node, limit: Node) -> None:
    def clipped(x: Tensor, limit: Tensor) -> Tensor:
        return saturate(x, limit)

    users = list(node.users)
    new: Node = splice(node.graph, clipped, node, limit, before=place_after(node))
    for user in users:
        user.replace_input_with(node, new)
