"""Operands of a wgrad in INT8 rotated along its contracted dimension before they are encoded (``linears.hadamard_wgrad``).

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
from fp8compile.numerics.hadamard import rotated
from fp8compile.recipe.recipe import Recipe

ROTATED, ROWS_VARY = ", rotated", ", not rotated: rows that vary from call to call"
NO_ROOM = ", not rotated: 16 equal values add up to 4 times their size, for which FP16 has no room"


class HadamardWgrads:
    """What of one graph was rotated; ``operands`` repeats views."""

    def __init__(self, operands: Operands) -> None:
        self._operands = operands
        self._rotated: dict[tuple[Node, int | None, int], Node] = {}

    def rotate(self, matmul: Matmul, recipe: Recipe) -> str:
        """Let a wgrad read its operands rotated; what the report says of it."""
        if matmul.direction != WGRAD or not recipe.linears.hadamard_wgrad or recipe.linears.mode not in IN_INT8:
            return ""
        if not isinstance(matmul.M, int):
            return ROWS_VARY
        if any(operand.meta["val"].dtype == torch.float16 for operand in matmul.operands):
            return NO_ROOM
        at = PLAIN_MATMULS[matmul.node.target]
        for i, (operand, side) in enumerate(zip(matmul.operands, ("left", "right"), strict=True)):
            matmul.node.update_arg(at + i, self._of(operand, side))
        return ROTATED

    def _of(self, operand: Node, side: str) -> Node:
        base, width, views, axis = beneath(operand, side, True, True)
        assert axis is not None
        if (base, width, axis) not in self._rotated:

            def rotate(x: Tensor) -> Tensor:
                return rotated(x if width is None else x.reshape(-1, width), axis)

            found = splice(self._operands.graph, rotate, base, before=insertion_point_after(base))
            self._rotated[base, width, axis] = found
        return self._operands.with_views(self._rotated[base, width, axis], views)
