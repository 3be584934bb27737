"""Why a grouped matmul of experts is left in its dtype, beside what is against any linear (linear_reasons.py)."""

from __future__ import annotations

from torch.fx import Node

from fp8compile.analysis.linears import WGRAD
from fp8compile.encoding.paying import rates_for
from fp8compile.recipe.recipe import Recipe

OF_ROWS = ("auto", "tensorwise", "rowwise")  # values of Recipe.linear with which experts have scales of rows
OTHER_SCALES = 'experts: a grouped matmul has scales of rows, and linear="{linear}" has others'
NOT_PREDICTED = 'experts: no time of a grouped matmul is predicted; linear="rowwise" has them in FP8 (for {rates})'
NOT_OF_ROWS = "experts: a grouped matmul whose groups are not rows of the left operand"
WITH_MORE = "experts: a grouped matmul with a bias or a dtype of its own"


def reason_against_experts(node: Node, direction: str, recipe: Recipe) -> str | None:
    """None where nothing is against it."""
    rates = rates_for(node.meta["val"].device, recipe)
    if recipe.linear not in OF_ROWS:
        return OTHER_SCALES.format(linear=recipe.linear)
    if recipe.linear == "auto" and rates is not None:
        return NOT_PREDICTED.format(rates=rates.name)
    if node.kwargs or len(node.args) != 3:
        return WITH_MORE
    dims = tuple(operand.meta["val"].dim() for operand in node.all_input_nodes[:2])
    return None if dims == ((2, 2) if direction == WGRAD else (2, 3)) else NOT_OF_ROWS
