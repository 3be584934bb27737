"""The two halves of a training graph as one graph: forward, then backward, from a gradient of the loss that is 1.

    forward half    placeholders, operations                        results, then what is kept for the backward
    backward half   what is kept, tangents                          gradients
    joined          placeholders, forward, ones(loss), backward     results and gradients, each by its position

What is kept crosses no boundary any more, and Inductor would compute it again where it is read: codes from the value that
they were to replace. So it is marked to be stored, and each operation is marked with its part (``PART``), which
``compiling.py`` reads. Numbers stay as they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fp8compile import _torch as private
from fp8compile.compiler.hooks import Halves
from fp8compile.fx.aot import (
    differentiated,
    gradients,
    is_tangent,
    output_descriptors,
    overwritten_input,
    plain_position,
    position,
    result_position,
)
from fp8compile.fx.graph import called, is_size, is_tensor, storage_root

aten = torch.ops.aten

PART = "fp8compile_part"  # in the meta of an operation of a whole step: a number
APART = "fp8compile_apart"  # in the meta of an operation that shares no kernel with others of its part
FORWARD, BACKWARD = 0, 1
FIRST_UPDATE = 2  # the updates of parameters have the numbers from here on


class CannotJoin(Exception):
    """A training graph of which no whole step is made, with the reason."""


@dataclass
class Joined:
    """One graph of forward and backward, without an output as yet.

    Attributes:
        owner: holds the graph's constants.
        inputs: by position among the inputs of the graph that Dynamo captured.
        gradients: likewise, of the inputs that have one.
        results: what Dynamo's graph returns, by position; nodes, numbers or None.
        overwritten: by position among the inputs, what the forward leaves in them.
        loss: the position of the loss among the results.
        end: the output node, which returns nothing as yet.
    """

    graph: Graph
    owner: GraphModule
    inputs: dict[int, Node]
    gradients: dict[int, Node] = field(default_factory=dict)
    results: dict[int, Any] = field(default_factory=dict)
    overwritten: dict[int, Node] = field(default_factory=dict)
    loss: int = 0
    end: Any = None


def joined(halves: Halves) -> Joined:
    """One graph of both halves, which stay as they are.

    Raises:
        CannotJoin: inputs, results or tangents that only AOTAutograd's own calling convention can handle.
    """
    copied: dict[Node, Node] = {}
    new = Joined(Graph(), private.LazyGraphModule({}, Graph()), {})
    _copy_half(new, halves.fw, copied, FORWARD)
    for node in new.graph.find_nodes(op="placeholder"):
        if (at := plain_position(node)) is None:
            raise CannotJoin(f"the graph takes {node.name}, which is none of the inputs that Dynamo has captured")
        new.inputs[at] = node
    results: Any = halves.fw.graph.output_node().args[0]
    own, kept = results[: halves.own_results], results[halves.own_results :]
    _take_results(new, halves, [copied.get(each, each) for each in own])
    takes = halves.bw.graph.find_nodes(op="placeholder")
    sizes = [each for each in kept if is_size(each)]
    values = [each for each in kept if each not in sizes]
    copied |= {used: copied[made] for used, made in zip(takes, (*sizes, *values), strict=False)}
    for each in values:
        _store(copied[each])
    new.loss = _begin_backward(new.graph, takes[len(kept) :], copied)
    _copy_half(new, halves.bw, copied, BACKWARD)
    new.gradients = {_known(position(desc)): copied[node] for desc, node in gradients(halves.bw.graph)}
    new.end = new.graph.output(())
    return new


def _known(at: int | None) -> int:
    assert at is not None
    return at


def _copy_half(new: Joined, half: GraphModule, copied: dict[Node, Node], part: int) -> None:
    for node in half.graph.nodes:
        if node.op == "output" or node in copied:
            continue
        if called(node) is not None:
            raise CannotJoin("the graph calls nested compile regions, which are not inlined")
        copied[node] = new.graph.node_copy(node, copied.__getitem__)
        copied[node].meta[PART] = part
        if node.op == "get_attr":
            copied[node].target = _constant(new.owner, half, str(node.target))


def _constant(owner: GraphModule, half: GraphModule, name: str) -> str:
    """The name under which ``owner`` holds a constant of a half."""
    value: Any = half
    for each in name.split("."):
        value = getattr(value, each)
    free = next(n for n in (f"constant_{i}" for i in itertools.count()) if not hasattr(owner, n))
    setattr(owner, free, value)
    return free


def _take_results(new: Joined, halves: Halves, own: list[Any]) -> None:
    """Sort the forward's own results into those that Dynamo's graph returns and those that are left in inputs."""
    descs = output_descriptors(halves.fw.graph)[: len(own)]
    for result, desc in zip(own, descs, strict=True):
        if (written := overwritten_input(desc)) is not None:
            new.overwritten[_known(position(written))] = result
        elif (at := result_position(desc)) is not None:
            new.results[at] = result
        else:
            raise CannotJoin(f"the forward returns {type(desc).__name__}: results that are views of one another")


def _store(node: Node) -> None:
    """Have Inductor store a value that the backward reads, or what it is a view of."""
    root = storage_root(node)
    if is_tensor(root) and root.op == "call_function":
        root.meta[private.STORED] = True


def _begin_backward(graph: Graph, tangents: list[Node], copied: dict[Node, Node]) -> int:
    """Let the only tangent be 1; returns the position of the loss among the results."""
    of = [differentiated(node) if is_tangent(node) else None for node in tangents]
    if len(of) != 1 or of[0] is None:
        raise CannotJoin(
            "the graph has another differentiable result than its loss: an input that it overwrites, say"
        )
    loss = tangents[0].meta["val"]
    if loss.dim():
        raise CannotJoin(f"the loss has the shape {[*loss.shape]}: one number is needed")
    one: Callable[..., Any] = aten.full.default
    begin = graph.call_function(one, ((), 1.0), {"dtype": loss.dtype, "device": loss.device, "pin_memory": False})
    begin.meta |= {"val": loss, PART: BACKWARD}
    copied[tangents[0]] = begin
    return of[0]
