"""Operands of a wgrad in INT8 turned along its contracted dimension before they are encoded (``linears.hadamard_wgrad``).

    dW [N, K] = (H dy)' (H x)       H of numerics/hadamard.py, over the rows M

Linears that read one input share what is made of it. A row of zeros that fills up a block adds nothing to a sum.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Node

from fp8compile.analysis.linears import PLAIN_MATMULS, WGRAD, Matmul
from fp8compile.encoding.integer_matmuls import IN_INT8
from fp8compile.encoding.operands import Operands
from fp8compile.encoding.views import beneath
from fp8compile.fx.graph import insertion_point_after, splice
from fp8compile.numerics.hadamard import turned
from fp8compile.recipe.recipe import Recipe

TURNED, ROWS_VARY = ", turned", ", not turned: rows that vary from call to call"
NO_ROOM = ", not turned: 16 equal values add up to 4 times their size, for which FP16 has no room"


class TurnedWgrads:
    """What of one graph was turned; ``operands`` repeats views."""

    def __init__(self, operands: Operands) -> None:
        self._operands = operands
        self._turned: dict[tuple[Node, int | None, int], Node] = {}

    def turn(self, matmul: Matmul, recipe: Recipe) -> str:
        """Let a wgrad read what its operands are turned into; what the report says of it."""
        if matmul.direction != WGRAD or not recipe.linears.hadamard_wgrad or recipe.linears.mode not in IN_INT8:
            return ""
        if not isinstance(matmul.M, int):
            return ROWS_VARY
        if any(operand.meta["val"].dtype == torch.float16 for operand in matmul.operands):
            return NO_ROOM
        at = PLAIN_MATMULS[matmul.node.target]
        for i, (operand, side) in enumerate(zip(matmul.operands, ("left", "right"), strict=True)):
            matmul.node.update_arg(at + i, self._of(operand, side))
        return TURNED

    def _of(self, operand: Node, side: str) -> Node:
        base, width, views, axis = beneath(operand, side, True, True)
        assert axis is not None
        if (base, width, axis) not in self._turned:

            def turn(x: Tensor) -> Tensor:
                return turned(x if width is None else x.reshape(-1, width), axis)

            found = splice(self._operands.graph, turn, base, before=insertion_point_after(base))
            self._turned[base, width, axis] = found
        return self._operands.with_views(self._turned[base, width, axis], views)
