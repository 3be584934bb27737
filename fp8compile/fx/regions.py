"""Regions that torch.compile traces once and calls often (``torch.compiler.nested_compile_region``), rewritten like the rest.

AOTAutograd cuts each region by itself, before the graph that calls it, and then hands what its forward keeps through that
graph to its backward:

    region    primals, tangents  --joint passes, partitioner-->  forward: results, kept     backward: kept, tangents
    caller    y, *kept = forward(x, w)   ...   dx, dw = backward(*kept, dy)

So the region's passes see it as they see a whole model, once they know which of its inputs are parameters, and what they
encode is encoded for each call. A region's graph shows neither which inputs are parameters nor who calls it. Dynamo's graph
does: there each call has an identifier, and each operand a source. ``find_regions`` takes both from it and marks the region's
operations with the identifier in ``meta["custom"]``, which torch copies from graph to graph. ``describe`` gives the inputs of
a joint graph with that mark the descriptors that those of a whole model have. An input is a parameter if it is one in every
call.

In the caller, the values that a region keeps are results of the call (``kept_by_region``): they are neither encoded again nor
reported there. A result that only passes on an operand, such as a weight, is that operand's storage
(``fp8compile.fx.graph.storage_root``).

A region in a region is not cut by torch 2.13: its calls stay as they are, forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fp8compile import _torch as private
from fp8compile.fx.aot import describe_joint
from fp8compile.fx.graph import called, is_call_of_region, nbytes, storage_root
from fp8compile.fx.partition import PartitionedGraph, SavedTensor
from fp8compile.fx.provenance import module_path

MARK = "fp8compile_region"  # in the meta["custom"] of a region's operations: its identifier
RESULTS = "fp8compile_results"  # in the meta of both halves of a region: how many results its caller asked for

NOT_DESCRIBED = "a region whose inputs torch passes in another order than Dynamo is left as it is"


@dataclass(frozen=True)
class Region:
    """What Dynamo's graph shows of a region.

    Attributes:
        operands: how many inputs it has.
        parameters: which of them are parameters in every call.
        path: the module of its first call, in which its operations stand.
    """

    operands: int
    parameters: frozenset[int]
    path: str


def find_regions(gm: GraphModule, parameters: frozenset[int]) -> dict[str, Region]:
    """The regions of a Dynamo graph by identifier; ``parameters`` are positions among its inputs. Marks what is in them."""
    inputs = gm.graph.find_nodes(op="placeholder")
    found: dict[str, Region] = {}
    for call, body, known in _calls(gm, {inputs[i] for i in parameters}):
        identifier = str(call.args[1])
        earlier = found.get(identifier)
        found[identifier] = Region(
            len(call.args) - 2,
            known & earlier.parameters if earlier else known,
            earlier.path if earlier else module_path(call),
        )
        _mark(body.graph, identifier)
    return found


def _calls(gm: GraphModule, known: set[Node]) -> Iterator[tuple[Node, GraphModule, frozenset[int]]]:
    """Every call of a region in a graph and the graphs nested in it, and which of its operands are parameters."""
    for node in gm.graph.nodes:
        for body, operands in _bodies(gm, node):
            inputs = body.graph.find_nodes(op="placeholder")
            if len(inputs) != len(operands):
                operands = (None,) * len(inputs)  # an operator that hands on its operands in another way
            at = frozenset(i for i, operand in enumerate(operands) if operand in known)
            if is_call_of_region(node):
                yield node, body, at
            yield from _calls(body, {inputs[i] for i in at})


def _bodies(gm: GraphModule, node: Node) -> Iterator[tuple[GraphModule, tuple[Any, ...]]]:
    """The graphs that a higher-order operator runs, with the operands behind each."""
    for i, argument in enumerate(node.args):
        if isinstance(argument, Node) and argument.op == "get_attr":
            body = getattr(gm, str(argument.target), None)
            if isinstance(body, GraphModule):
                yield body, node.args[i + 1 + is_call_of_region(node) :]


def _mark(graph: Graph, identifier: str) -> None:
    for node in graph.nodes:  # not on calls, whose "custom" torch numbers in place
        if node.op.startswith("call") and not isinstance(node.target, torch._ops.HigherOrderOperator):
            node.meta["custom"] = {**(node.meta.get("custom") or {}), MARK: identifier}


def describe(graph: Graph, regions: Mapping[str, Region]) -> Region | None:
    """Give the inputs and results of a region's joint graph the descriptions they would have in a whole model's."""
    inputs = graph.find_nodes(op="placeholder")
    tangents = [n for n in inputs if "tangents" in str(n.target)]  # upstream's partitioner knows them by that too
    if not tangents or any("desc" in n.meta for n in inputs):
        return None
    marks = ((n.meta.get("custom") or {}).get(MARK) for n in graph.nodes)
    region = regions.get(next((mark for mark in marks if mark is not None), ""))
    primals = [n for n in inputs if n not in tangents]
    results: Any = graph.output_node().args[0]
    if region is None or region.operands != len(primals) or len(results) <= len(primals):
        return None
    for node in primals:
        node.meta.pop("nn_module_stack", None)  # where the traced call happened to be
    describe_joint(graph, primals, tangents, region.parameters)
    _remember_what_was_written(graph)
    return region


def _remember_what_was_written(graph: Graph) -> None:
    """Note again which of the user's operations each operation is a part of: torch traces a region twice and loses that.

    ``meta["original_aten"]`` is then the operation itself, ``exp`` for what was ``silu``. In the forward, the function that
    the user called is still known; an operation of the backward has the same ``seq_nr``.
    """
    written: dict[Any, Any] = {}
    for node in graph.nodes:
        called_by_user = (node.meta.get("source_fn_stack") or [("", None)])[-1][1]
        packet = getattr(torch.ops.aten, getattr(called_by_user, "__name__", ""), None)
        if "default" in getattr(packet, "overloads", list)():
            written.setdefault(node.meta.get("seq_nr"), packet.default)  # type: ignore[union-attr]
    for node in graph.nodes:
        if node.meta.get("original_aten") is node.target and (op := written.get(node.meta.get("seq_nr"))):
            node.meta["original_aten"] = op


def is_described(graph: Graph) -> bool:
    """Whether the inputs of a joint graph have descriptors."""
    return any("desc" in n.meta for n in graph.find_nodes(op="placeholder"))


def mark_halves(fw: GraphModule, bw: GraphModule, results: int) -> None:
    """Note on both halves of a region that they are cut, since Inductor runs its joint passes on them again."""
    fw.meta[RESULTS] = bw.meta[RESULTS] = results


def is_half(gm: GraphModule) -> bool:
    return RESULTS in gm.meta


def kept_by_region(node: Node) -> bool:
    """Whether a value of a caller's forward is one that a region keeps for its own backward, in addition to its results."""
    call = node.args[0] if node.target is private.getitem else None
    if not isinstance(call, Node) or (body := called(call)) is None:
        return False
    results: int = body.meta.get(RESULTS, len(call.users) + 1)
    return int(node.args[1]) >= results  # type: ignore[arg-type]


def saves_itself(split: PartitionedGraph, edge: SavedTensor) -> bool:
    """Whether a graph saves a tensor itself and for the backward alone: no region does, and the caller does not own it."""
    made = edge.forward
    return edge.is_tensor and not kept_by_region(made) and not split.caller_owns(storage_root(made))


def storages(split: PartitionedGraph) -> tuple[tuple[int | None, int], ...]:
    """What a region keeps, as ``Cut.plain``."""
    roots = {storage_root(e.forward) for e in split.edges if e.is_tensor}
    kept = [root for root in roots if not split.caller_owns(root)]
    position = {node: i for i, node in enumerate(split.inputs)}
    return tuple((position.get(root), nbytes(root.meta["val"])) for root in kept)
