"""Copies of saved values to the host and back, as operations of the two halves.

               forward                                            backward
    a GPU      h = ao.offload(x); ...; h = ao.wait_tensor(h, x)   y = ao.reload(h); ...; y = ao.wait_tensor(y, h)
    a CPU                         ...; h = clone(x)               y = clone(h);     ...

The operators are torch's (``torch._functorch._activation_offloading``, from 2.12 on). What orders what, on a GPU:

    the copy reads x after it is made        its stream waits for the stream that computes, then copies
    x is not overwritten under the copy      its memory is free behind ``wait_tensor``, an operand of which it is: there the
                                             stream that computes waits for the event that the copy's end records
    the copy back reads all of h             both copies are in one stream, in this order
    y's memory is not in use any more        it is allocated for the stream that computes, and the copy waits for that stream
    y is read after it is whole              its readers stand behind ``wait_tensor``, as above
    h is not reused under a copy             pinned memory is torch's: freed memory waits for the events of its copies

The third argument of ``wait_tensor`` keeps x; the second would empty x's storage, and Inductor may use that memory again for
another buffer, and a backward may run twice. No stream of the host waits: a hook on saved tensors that reads one on the host
(``torch.autograd.graph.save_on_cpu``) reads it too early.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from fp8compile import _torch as private
from fp8compile.cost.clock import Clock
from fp8compile.fx.graph import AWAITED, DEVICE, ENCODING, HOST, MOVED, SPLICED, insertion_point_after, storage_root
from fp8compile.fx.partition import PartitionedGraph, SavedTensor
from fp8compile.fx.tracing import fake_result
from fp8compile.memory.link import Times

CLONE = torch.ops.aten.clone.default


def send_to_host(
    split: PartitionedGraph, edges: Sequence[SavedTensor], times: Times, forward: Clock, backward: Clock
) -> None:
    """Save a copy on the host in place of a storage. ``edges`` are what the backward reads of it: itself, or views of it."""
    root, first = storage_root(edges[0].forward), edges[0]
    host = to_host(split.fw.graph, root, insertion_point_after(root), forward.first_from(times.gone, root))
    used = split.placeholder(first, host, "on_host")
    used.meta[MOVED] = HOST
    readers = {user for edge in edges for user in edge.backward.users}
    read = next(node for node in backward.starts if node in readers)
    back = backward.last_until(times.back, read)
    value = from_host(split.bw.graph, used, root.meta["val"].device, back, read)
    for edge in edges:
        edge.backward.replace_all_uses_with(_view_again(edge, root, value, read))
        split.replace(edge, *([(host, used)] if edge is first else []))


def _view_again(edge: SavedTensor, root: Node, value: Node, before: Node) -> Node:
    """The views of ``root`` that a saved value is, in the backward, of ``value``."""
    views, node = list[Node](), edge.forward
    while node is not root:
        assert len(node.all_input_nodes) == 1, "its sizes are numbers"
        views.append(node)
        node = node.all_input_nodes[0]
    for view in reversed(views):
        with value.graph.inserting_before(before):
            value = _copied(view, value)
    return value


def _copied(view: Node, value: Node) -> Node:
    copy = value.graph.node_copy(view, lambda _: value)
    copy.meta.pop(ENCODING, None)  # of the forward's codes: each half has its own
    copy.meta |= {SPLICED: value.meta[SPLICED], "val": _value(copy)}
    return copy


def to_host(graph: Graph, value: Node, made: Node, gone: Node) -> Node:
    """A copy of ``value`` in the host's memory, begun before the node ``made``; the value's memory is free at ``gone``."""
    if value.meta["val"].device.type == "cpu":
        return _moved(graph, gone, HOST, CLONE, value)
    ops = private.transfers()
    host = _moved(graph, made, HOST, ops.offload.default, value)
    return _moved(graph, gone, HOST, ops.wait_tensor.default, host, *private.until_waited_for(value))


def from_host(graph: Graph, host: Node, device: torch.device, back: Node, read: Node) -> Node:
    """A copy of ``host`` on ``device``, begun before the node ``back`` and done before the node ``read``."""
    if device.type == "cpu":
        return _moved(graph, back, DEVICE, CLONE, host)
    ops = private.transfers()
    copy = _moved(graph, back, DEVICE, ops.reload.default, host, device)
    return _moved(graph, read, AWAITED, ops.wait_tensor.default, copy, *private.until_waited_for(host))


def _moved(graph: Graph, before: Node, where: str, target: Callable[..., Any], *args: Any) -> Node:
    with graph.inserting_before(before):
        node = graph.call_function(target, args)
    of = args[0]
    node.meta = {key: of.meta[key] for key in ("stack_trace", "nn_module_stack") if key in of.meta}
    node.meta |= {MOVED: where, SPLICED: f"{'to' if where == HOST else 'from'}_host({of.name})"}
    node.meta["val"] = _value(node)
    return node


def _value(node: Node) -> Any:
    mode = private.detect_fake_mode([n.meta["val"] for n in node.all_input_nodes])
    assert mode is not None, "values of a graph that is compiling are fake"
    with mode:
        return fake_result(node)
