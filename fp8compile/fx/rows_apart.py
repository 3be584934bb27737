"""Rows of a matrix as tensors of their own, without a copy, for generated code.

A kernel that reads a row of a larger tensor holds the row's place in its text. So kernels that are alike but for the row are
compiled one by one. Each row that comes as a tensor of its own is an argument, and their text is one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8compile import _torch as private
from fp8compile.numerics.operators import operator


def _first_of_rows(x: Tensor, rows: Sequence[int]) -> list[Tensor]:
    """The first element of each of these rows of ``x`` ``[R, C]``: views ``[1, 1]``."""
    every = torch.split(x.narrow(1, 0, 1), 1)
    return [every[row] for row in rows]


# By (a) Inductor knows that the results lie in their operand's memory, which no other buffer may take.
FIRST_OF_ROWS = operator("first_of_rows(Tensor(a) x, int[] rows) -> Tensor(a)[]", _first_of_rows, pointwise=False)
private.inductor_lowering.make_fallback(FIRST_OF_ROWS, warn=False)
