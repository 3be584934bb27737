"""Numbers stay as they are. Attention without dropout is computed again without the state of a random generator.

    forward    state, y = run_and_save_rng_state(attention, q, k, v)      y = attention(q, k, v)
    backward   y = run_with_rng_state(state, attention, q, k, v)          y = attention(q, k, v)

A checkpointed region keeps the generator's state for each operation that may draw from it, and puts it back before the
operation is repeated: on a GPU the state goes to the host and back. Attention draws nothing where its ``dropout_p`` is 0, so
it leaves the generator as it was. What is left is an operation like others, which the passes behind this one know.

Left as they are: operations that draw, or of which that is not known.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from fp8compile import _torch as private
from fp8compile.fx.ops import draws_random_numbers, is_attention, is_random_state
from fp8compile.fx.partition import PartitionedGraph
from fp8compile.fx.tracing import result_of
from fp8compile.recipe.context import Context
from fp8compile.reporting.entries import Notes

ops = torch.ops.higher_order


def drop_random_states(split: PartitionedGraph, ctx: Context) -> Notes:
    """Call operations that draw nothing without a generator's state, in both halves."""
    for graph in (split.fw.graph, split.bw.graph):
        for node in list(graph.nodes):
            called = _called(node)
            if called is not None:
                _call_plainly(graph, node, *called)
    for edge in list(split.edges):
        if not edge.backward.users and is_random_state(edge.forward):
            split.replace(edge)
    split.fw.graph.eliminate_dead_code()
    return Notes()


def _called(node: Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """The operation that a node calls beside a generator's state, with its arguments."""
    args, kwargs = node.args, dict(node.kwargs)
    if node.target is ops.run_and_save_rng_state:
        return args[0], args[1:], kwargs
    if node.target is ops.run_with_rng_state:
        return args[1], args[2:], kwargs
    if node.target is ops.graphsafe_run_with_rng_state:
        kwargs.pop("rng_state", None)
        return args[0], args[1:], kwargs
    return None


def _call_plainly(graph: Graph, node: Node, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Put the operation itself in the place of the call, if it draws nothing."""
    with graph.inserting_before(node):
        plain = graph.call_function(op, args, kwargs)
    if not is_attention(plain) or draws_random_numbers(plain):
        graph.erase_node(plain)
        return
    fake_mode = private.detect_fake_mode([n.meta["val"] for n in plain.all_input_nodes])
    plain.meta = {**node.meta, "val": result_of(plain, fake_mode)}
    with_state = node.target is ops.run_and_save_rng_state  # its second result is the operation's
    for result in [user for user in node.users if user.args[1] == 1] if with_state else [node]:
        result.replace_all_uses_with(plain)
        graph.erase_node(result)
