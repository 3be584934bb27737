"""What a forward normalises with statistics that it is given: BatchNorm in evaluation, trained on.

    y = (x - m) s       m, and s = 1 / sqrt(v + eps) or the like, are made of the graph's inputs alone, a number a channel

The gain's gradient is sum(g y), and what follows reads y: an error of x counts beside x - m here too, however far m is from
zero. So x is stored about m, in units of 1/s, as what is normalised with statistics of its own (``norms.py``). Both halves
have m and v. If they say nothing of x, a code is off by a share of x - m all the same.

Only where s is an inverse, which is not zero. A factor that may be zero would leave nothing of x.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import Graph, Node

from fp8compile.analysis.norms import INVERSES, SAME_ELEMENTS, Norm, itself, norms_of
from fp8compile.analysis.ranges.matching import packet
from fp8compile.fx.graph import is_tensor, numel
from fp8compile.fx.ops import is_pointwise

aten = torch.ops.aten


def all_norms_of(graph: Graph) -> Mapping[Node, Norm]:
    """The values that a forward graph normalises, with statistics of their own or with given ones."""
    return {**_frozen_norms_of(graph), **norms_of(graph)}


def _frozen_norms_of(graph: Graph) -> dict[Node, Norm]:
    given: dict[Node, bool] = {}  # what is made of inputs alone; whether it is an inverse
    centred: dict[Node, tuple[Node, Node]] = {}  # x - m, with x and m
    found: dict[Node, Norm] = {}
    for node in graph.nodes:
        read = node.all_input_nodes
        if node.op == "placeholder" and is_tensor(node):
            given[node] = False
        elif not is_tensor(node) or not (is_pointwise(node) or packet(node) in SAME_ELEMENTS):
            continue
        elif read and all(n in given for n in read):
            given[node] = packet(node) in INVERSES or any(given[n] for n in read)
        elif (parts := _minus(node, given)) is not None:
            centred[node] = parts
        elif (norm := _scaled(node, given, centred)) is not None and norm.seen is not None:
            found[itself(norm.seen)] = norm
    return found


def _minus(node: Node, given: Mapping[Node, bool]) -> tuple[Node, Node] | None:
    """``x`` and ``m`` of ``x - m``."""
    if packet(node) is not aten.sub or node.kwargs:
        return None
    x, mean = node.args[:2]
    is_one = isinstance(x, Node) and isinstance(mean, Node) and mean in given
    return (x, mean) if is_one and _is_smaller(mean, node) else None  # type: ignore[arg-type, return-value]


def _scaled(node: Node, given: Mapping[Node, bool], centred: Mapping[Node, tuple[Node, Node]]) -> Norm | None:
    """What is made of ``x - m`` by an inverse."""
    if packet(node) is not aten.mul or node.kwargs:
        return None
    deviation = next((n for n in node.all_input_nodes if n in centred), None)
    scale = next((n for n in node.all_input_nodes if given.get(n)), None)
    if deviation is None or scale is None or not _is_smaller(scale, node):
        return None
    x, mean = centred[deviation]
    return Norm(mean, scale, divides=False, seen=x)


def _is_smaller(statistic: Node, node: Node) -> bool:
    return numel(statistic.meta["val"]) < numel(node.meta["val"])
