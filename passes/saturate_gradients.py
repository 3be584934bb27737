"""Numbers change only where a loss scaler asks for it at run time: FP16 gradients are clipped to +-65504, not left at inf.

Graphcore's automatic loss scaling clips and never skips a step. The limit is an extra input of the graph: a tensor that is
inf, which clips nothing, until a scaler in histogram mode sets it (see fp8compile/observe/slot.py). The pass clips gradients
of activations that generated code makes or is the first to read, where it costs no bytes, and those that come into the
graph. It does not clip gradients that go from one matmul straight into another (a copy each), nor those of parameters, which
the scaler reads and writes anyway. NaN stays NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fp8compile.fx.aot import BACKWARD, is_training
from fp8compile.fx.graph import CLIPPED, insertion_point_after, splice, storage_root
from fp8compile.fx.ops import contracts
from fp8compile.numerics.histogram import saturate
from fp8compile.observe.records import ACTIVATION
from fp8compile.observe.selection import leaves_a_contraction, observable, read_by
from fp8compile.recipe.context import Context
from fp8compile.reporting.entries import Notes

aten = torch.ops.aten


def saturate_gradients(graph: Graph, ctx: Context) -> Notes:
    """Clip FP16 gradients of activations to the graph's limit."""
    if (
        ctx.stats_inputs is None
        or not is_training(graph)
        or (limit := ctx.input_at(graph, ctx.stats_inputs.limit)) is None
    ):
        return Notes()
    if limit.users:
        return Notes()  # it has run before
    for value in observable(graph, ctx, everything=True):
        of_activation = value.kind == ACTIVATION and value.direction == BACKWARD
        root = storage_root(value.node)
        if of_activation and root.meta["val"].dtype == torch.float16 and _is_free(root):
            _clip(root, limit)
    return Notes()


def _clip(node: Node, limit: Node) -> None:
    def clipped(x: Tensor, limit: Tensor) -> Tensor:
        return saturate(x, limit)

    users = list(node.users)
    new: Node = splice(node.graph, clipped, node, limit, before=insertion_point_after(node), mark=CLIPPED)
    for user in users:
        user.replace_input_with(node, new)


def _is_free(root: Node) -> bool:
    """Whether a clip costs no bytes: generated code makes the value, or is its only reader.

    Between two kernels that are not generated the clip would be a copy. Where the gradients of three or more matmuls are
    added up (q, k and v of one input), Inductor splits the kernel that reads them in two once they are clipped.
    """
    if not leaves_a_contraction(root):
        return True
    readers = list(read_by(root))
    return not any(map(contracts, readers)) and not any(_contractions_in(reader) > 2 for reader in readers)


def _contractions_in(node: Node) -> int:
    """How many contractions the sum adds up that ``node`` is a part of."""
    while node.target is aten.add.Tensor and [u.target for u in read_by(node)] == [aten.add.Tensor]:
        node = next(read_by(node))
    return _leaves(node)


def _leaves(node: Node) -> int:
    root = storage_root(node)
    if root.target is aten.add.Tensor:
        return sum(_leaves(n) for n in root.all_input_nodes)
    return int(leaves_a_contraction(root))
