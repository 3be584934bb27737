"""Why a grouped matmul of experts is left in its dtype, beside what is against any linear (reasons.py), and routers.

A router is a linear of whose outputs top-k, a sort or argmax chooses some, behind operations that keep as many columns, as
a softmax does. A choice is a step: where two outputs are near one another, an error of any size sends a token to another
expert, and changes its result by as much as there is. A router has an output for each expert: its time is small.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from fp8compile.fx.graph import is_tensor
from fp8compile.fx.ops import WGRAD, contracts
from fp8compile.recipe.rates import rates_for
from fp8compile.recipe.recipe import Recipe

aten = torch.ops.aten

OF_ROWS = ("auto", "tensorwise", "rowwise")  # values of Recipe.linears.mode with which experts have scales of rows
OTHER_SCALES = 'experts: a grouped matmul has scales of rows, and linears="{linear}" has others'
NOT_PREDICTED = 'experts: no time of a grouped matmul is predicted; linears="rowwise" has them in FP8 (for {rates})'
NOT_OF_ROWS = "experts: a grouped matmul whose groups are not rows of the left operand"
ROUTER = "router: experts are chosen by it, and a choice is a step"
OPAQUE = "experts: grouped_mm_fallback is an operator of Transformers' own, whose matmuls no graph shows"
FALLBACK = "transformers::grouped_mm_fallback"
CHOICES = (aten.topk.default, aten.sort.default, aten.sort.stable, aten.argmax.default)
WITH_MORE = "experts: a grouped matmul with a bias or a dtype of its own"


def reason_against_experts(node: Node, direction: str, recipe: Recipe) -> str | None:
    """None where nothing is against it."""
    rates = rates_for(node.meta["val"].device, recipe)
    if recipe.linears.mode not in OF_ROWS:
        return OTHER_SCALES.format(linear=recipe.linears.mode)
    if recipe.linears.mode == "auto" and rates is not None:
        return NOT_PREDICTED.format(rates=rates.name)
    if node.kwargs or len(node.args) != 3:
        return WITH_MORE
    dims = tuple(operand.meta["val"].dim() for operand in node.all_input_nodes[:2])
    return None if dims == ((2, 2) if direction == WGRAD else (2, 3)) else NOT_OF_ROWS


def routers(graph: Graph) -> set[Node]:
    """The matmuls of whose outputs some are chosen by their sizes."""
    found, seen = set[Node](), set[Node]()
    waiting = [node.all_input_nodes[0] for node in graph.nodes if node.target in CHOICES]
    while waiting:
        node = waiting.pop()
        if contracts(node):
            found.add(node)
        elif node not in seen:
            seen.add(node)
            waiting += [n for n in node.all_input_nodes if is_tensor(n) and _columns(n) == _columns(node)]
    return found


def _columns(node: Node) -> int | torch.SymInt | None:
    shape = node.meta["val"].shape
    return shape[-1] if len(shape) else None


def opaque_experts(graph: Graph) -> list[Node]:
    """Matmuls of experts behind an operator of Transformers', which takes the place of a grouped matmul in other dtypes."""
    return [
        node for node in graph.nodes if getattr(node.target, "_schema", None) and node.target._schema.name == FALLBACK
    ]
