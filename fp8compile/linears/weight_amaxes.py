"""Scales of all weights of a graph on a GPU at once: two launches for their amaxes, and one for each 16.

Weights are known before anything is computed. By itself each amax takes two launches, in halves, and its scale one, and a
launch costs the host as much for a weight as for an activation: in a ViT block of six linears these were 18 of 91.
``torch._foreach_norm`` with the norm infinity is |w|'s maximum, NaN where there is one. Rounding to 16 bits keeps an order,
so the amax of a weight that autocast rounds is its own amax, rounded. Scales are made together (fx/scales_at_once.py).

Left as they are: weights whose codes or scales come in with the inputs, rowwise scales, weights that are computed (gathered
from ranks in the graph, merged with an adapter), rounded to FP16, not contiguous, or single.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fp8compile.fx.graph import INV_SCALES, is_static, splice
from fp8compile.fx.ops import CASTS
from fp8compile.fx.scales_at_once import SCALES_AT_ONCE
from fp8compile.linears.known_scales import WEIGHT
from fp8compile.linears.plan import Apply
from fp8compile.linears.views import beneath
from fp8compile.numerics.formats import Format

FEWEST = 2
Weights = dict[Node, Node]  # by what is encoded, the input of the graph that it is made of


def take_scales_at_once(graph: Graph, applied: Sequence[Apply]) -> None:
    """Compute the scales of weights that are inputs of the graph: ``INV_SCALES`` in the meta of what is encoded."""
    lists: dict[tuple[Format, torch.dtype, torch.dtype], Weights] = defaultdict(dict)
    for value, fmt in _weights(applied):
        if (weight := _input_beneath(value)) is not None:
            lists[fmt, weight.meta["val"].dtype, value.meta["val"].dtype][value] = weight
    for (fmt, _, rounded), weights in lists.items():
        if len(weights) >= FEWEST:
            _take(graph, fmt, rounded, weights)


def _weights(applied: Sequence[Apply]) -> Iterator[tuple[Node, Format]]:
    """What is encoded under a scale of its own, and in which format."""
    for each in applied:
        for operand, side, spec in zip(each.matmul.operands, ("left", "right"), each.specs, strict=True):
            if spec.role == WEIGHT and not (spec.rowwise or spec.delayed or spec.cached):
                yield beneath(operand, side, spec.rowwise)[0], spec.format


def _input_beneath(value: Node) -> Node | None:
    """The input of the graph that a value on a GPU is, or is rounded from; None for any other."""
    weight = value.args[0] if value.target in CASTS else value
    if not isinstance(weight, Node) or weight.op != "placeholder" or not is_static(weight):
        return None
    found = weight.meta["val"]
    if value.meta["val"].dtype not in (found.dtype, torch.bfloat16):
        return None
    return weight if found.is_cuda and found.is_floating_point() and found.is_contiguous() and found.numel() else None


def _take(graph: Graph, fmt: Format, rounded: torch.dtype, weights: Weights) -> None:
    """``weights`` have one dtype; their scales are those of what is ``rounded`` to this one."""
    first = next(node for node in graph.nodes if node.op != "placeholder")

    def inv_scales(*weights: Tensor) -> tuple[Tensor, ...]:
        return tuple(SCALES_AT_ONCE(torch._foreach_norm(list(weights), math.inf), rounded, fmt.dtype))

    for value, inv_scale in zip(weights, splice(graph, inv_scales, *weights.values(), before=first), strict=True):
        value.meta.setdefault(INV_SCALES, {})[fmt] = inv_scale
