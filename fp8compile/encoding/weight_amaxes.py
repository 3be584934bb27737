"""Amaxes of all weights of a graph on a GPU at once: a maximum norm of a list, two launches whatever their number.

Weights are known before anything is computed. By itself each amax takes two launches, in halves, and a launch costs the host
as much for a weight as for an activation: in a ViT block of six linears these were 12 of 91.
``torch._foreach_norm`` with the norm infinity is |w|'s maximum, NaN where there is one. Rounding to 16 bits keeps an order,
so the amax of a weight that autocast rounds is its own amax, rounded.

Left as they are: weights whose codes or scales come in with the inputs, rowwise scales, weights that are computed (gathered
from ranks in the graph, merged with an adapter), those that are not contiguous, single ones.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fp8compile.encoding.known_scales import WEIGHT
from fp8compile.encoding.linear_plan import Apply
from fp8compile.encoding.views import beneath
from fp8compile.fx.graph import AMAX, is_static, splice
from fp8compile.fx.ops import CASTS

FEWEST = 2


def take_amaxes_at_once(graph: Graph, applied: Sequence[Apply]) -> None:
    """Compute the amaxes of weights that are inputs of the graph, and note each: ``AMAX`` in the meta of what is encoded."""
    lists: dict[torch.dtype, dict[Node, Node]] = defaultdict(dict)
    for value in _weights(applied):
        if (weight := _input_beneath(value)) is not None and AMAX not in value.meta:
            lists[weight.meta["val"].dtype][value] = weight
    for inputs in lists.values():
        if len(inputs) >= FEWEST:
            _take(graph, inputs)


def _weights(applied: Sequence[Apply]) -> Iterator[Node]:
    """What is encoded under a scale of its own."""
    for each in applied:
        for operand, side, spec in zip(each.matmul.operands, ("left", "right"), each.specs, strict=True):
            if spec.role == WEIGHT and not (spec.rowwise or spec.delayed or spec.cached):
                yield beneath(operand, side, spec.rowwise)[0]


def _input_beneath(value: Node) -> Node | None:
    """The input of the graph that a value on a GPU is, or is rounded from; None for any other."""
    weight = value.args[0] if value.target in CASTS else value
    if not isinstance(weight, Node) or weight.op != "placeholder" or not is_static(weight):
        return None
    found = weight.meta["val"]
    return weight if found.is_cuda and found.is_floating_point() and found.is_contiguous() and found.numel() else None


def _take(graph: Graph, inputs: dict[Node, Node]) -> None:
    """``inputs``: by what is encoded, the weight that it is made of; the weights have one dtype."""
    first = next(node for node in graph.nodes if node.op != "placeholder")

    def amaxes(*weights: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch._foreach_norm(list(weights), math.inf))

    for value, amax in zip(inputs, splice(graph, amaxes, *inputs.values(), before=first), strict=True):
        value.meta[AMAX] = _rounded(graph, amax, value.meta["val"].dtype, first)


def _rounded(graph: Graph, amax: Node, dtype: torch.dtype, before: Node) -> Node:
    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype)

    return amax if amax.meta["val"].dtype is dtype else splice(graph, rounded, amax, before=before)
