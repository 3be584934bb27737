"""Numbers change: what ranks send one another is rounded to one-byte codes, where ``Recipe.collectives`` asks for it.

Tensor and sequence parallelism, and sharding inside a graph (SimpleFSDP), leave their collectives in the joint graph. Each
``all_gather``, ``reduce_scatter`` and ``all_reduce`` of floating-point values sends groupwise codes, half of BF16's bytes
(``fp8compile/fx/wire.py``). A sum is taken in FP32 and rounded once; plain collectives round at each rank. For each
group the format is the better of E4M3 and INT8, since activations and gradients alike are sent. The cut between forward and
backward sees gathered codes, which are cheaper to save than what they stand for.

All ranks of a group must decide alike, and do: a decision reads the shape and dtype of a tensor, which a collective demands
to be equal on its ranks, and the graph and the recipe, which are those of one program.

Left as they are, each with its reason in the report: other reductions than sums and means, small tensors, integers, sizes
that only a run knows, what the user put in FP32 inside a 16-bit model, FP32 islands, one rank alone, other collectives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Set

from torch import Tensor
from torch.fx import Graph, Node

from fp8compile import _torch as private
from fp8compile.analysis.dataflow import user_fp32
from fp8compile.fx.aot import is_training
from fp8compile.fx.checkpointed import stand_in
from fp8compile.fx.graph import SPLICED, WIDENED, dtype_text, splice, storage_root
from fp8compile.fx.ops import is_collective, opname
from fp8compile.fx.provenance import TensorInfo, module_path, origin
from fp8compile.fx.wire import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Wire
from fp8compile.numerics import ENCODABLE, GroupwiseBest
from fp8compile.recipe.context import Context
from fp8compile.reporting.entries import COLLECTIVE, Collective, Notes, Skip

OPERATIONS = {
    "all_gather_into_tensor": ALL_GATHER,
    "reduce_scatter_tensor": REDUCE_SCATTER,
    "all_reduce": ALL_REDUCE,
}
NO_DATA = ("wait_tensor", "broadcast")  # of the same namespace, with nothing to encode in them
SUMS = ("sum", "avg")
LEAST = 2**14  # elements; the time of a smaller message is its latency


def compress_collectives(graph: Graph, ctx: Context) -> Notes:
    """Send codes in every collective that can carry them, or say why not."""
    if not ctx.recipe.compresses_collectives or not is_training(graph):
        return Notes()  # in inference the model computes as it is written
    upcast = user_fp32(graph, ctx.parameters_of(graph))
    notes = Notes()
    for node in list(filter(_is_collective, graph.nodes)):
        operand = node.all_input_nodes[0]
        info = dataclasses.replace(TensorInfo.of(operand), name=node.name, origin=origin(node))
        if reason := _reason_to_leave(node, operand, ctx, upcast):
            notes += Notes(skips=(Skip(info, reason, COLLECTIVE),))
        else:
            wire = _wire_of(node, operand, ctx)
            _rewrite(node, operand, wire)
            made = Collective(info, wire.operation, wire.ranks, wire.sent_plain, wire.sent, wire.codec.name)
            notes += Notes(collectives=(made,))
    return notes


def _is_collective(node: Node) -> bool:
    return is_collective(node) and opname(node) not in NO_DATA and SPLICED not in node.meta


def _reason_to_leave(node: Node, operand: Node, ctx: Context, upcast: Set[Node]) -> str | None:
    if left := ctx.skip_reason(module_path(node), "collectives", ("skip",)):
        return left
    if opname(node) not in OPERATIONS:
        return f"{opname(node)} is left as it is"
    return _of_the_call(node) or _of_the_operand(operand, upcast)


def _of_the_call(node: Node) -> str | None:
    if not isinstance(node.args[-1], str):
        return "its process group has no name"
    if OPERATIONS[opname(node)] != ALL_GATHER and node.args[1] not in SUMS:
        return f"its reduction is {node.args[1]!r}, neither a sum nor a mean"
    if [opname(user) for user in node.users] != ["wait_tensor"]:
        return "its result is not waited for once"
    return "one rank alone" if private.group_size(node.args[-1]) == 1 else None


def _of_the_operand(operand: Node, upcast: Set[Node]) -> str | None:
    value = operand.meta["val"]
    if value.dtype not in ENCODABLE:
        return f"{dtype_text(value)} is left alone"
    if not all(isinstance(size, int) for size in value.shape):
        return "its size is known at run time only"
    if value.numel() < LEAST:
        return f"fewer than {LEAST} elements"
    if WIDENED in storage_root(operand).meta:
        return "in an FP32 island: its range is what the island is for"
    return "the user computes this in FP32 inside a 16-bit model" if operand in upcast else None


def _wire_of(node: Node, operand: Node, ctx: Context) -> Wire:
    value, group = operand.meta["val"], node.args[-1]
    assert isinstance(group, str)
    codec = GroupwiseBest(ctx.recipe_at(module_path(node)).saved.group_size)
    mean = node.args[1] == "avg"
    return Wire(
        OPERATIONS[opname(node)], tuple(value.shape), value.dtype, private.group_size(group), group, mean, codec
    )


def _rewrite(node: Node, operand: Node, wire: Wire) -> None:
    """Encode where the collective stands, decode where it is waited for: what was computed in between still is."""

    def send_codes(x: Tensor) -> Tensor:
        return wire.begin(x)

    def receive_codes(received: Tensor) -> Tensor:
        return wire.end(received)

    (waits,) = node.users
    received = splice(node.graph, send_codes, operand, before=node)
    result: Node = splice(node.graph, receive_codes, received, before=waits)
    stand_in(result, waits)
    waits.replace_all_uses_with(result)
    node.graph.erase_node(waits)
    node.graph.erase_node(node)
