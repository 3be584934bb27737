"""Linears in INT8 (``linears="int8"``): which matmuls ``torch._int_mm`` takes, and the product that is put in place.

Each operand has one scale per row along the contracted dimension, as with "rowwise" (linears/operands.py). So a value that
two matmuls contract along different dimensions has two encodings. An activation has one for the forward, which reads and
drops it, and one for the wgrad, which is what is kept for the backward: a byte an element.

    matmul    left                  right
    forward   x  [M, K] per row     W' [K, N] per column
    dgrad     dy [M, N] per row     W  [N, K] per column
    wgrad     dy' [N, M] per row    x  [M, K] per column

On a CPU ``_int_mm`` takes any sizes. On a GPU its left operand has more than 16 rows, and its right one a multiple of 8
columns; what is contracted is filled up with zeros (linears/layouts.py). No product has been run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8compile.analysis.linears import Matmul
from fp8compile.numerics.integer_products import MOST_PRODUCTS, int8_product
from fp8compile.recipe.recipe import Recipe

INT8_MODE = "int8"
LEAST_ROWS, OF_COLUMNS = 17, 8  # of the left operand, of the right one's columns: on a GPU

SUMS_VARY = "rows that vary from call to call: an INT32 sum of the wgrad holds {most:,} of them"
FEW_ROWS = "{rows} rows of its left operand: on a GPU torch._int_mm takes more than 16"
ROWS_VARY = "rows that vary from call to call: on a GPU torch._int_mm takes more than 16, which has to be known"
COLUMNS = "{columns} columns of its right operand: on a GPU torch._int_mm takes multiples of 8"


def reason_against_integers(matmul: Matmul, recipe: Recipe) -> str | None:
    """Why one matmul of a linear cannot be in INT8, where its recipe asks for that."""
    if recipe.linears.mode != INT8_MODE or recipe.linears.emulate:
        return None
    left, right = (operand.meta["val"] for operand in matmul.operands)
    (rows, length), columns = left.shape, right.shape[1]
    if not isinstance(length, int) and not statically_known_true(length <= MOST_PRODUCTS):
        return SUMS_VARY.format(most=MOST_PRODUCTS)
    if left.device.type == "cpu":
        return None
    if not statically_known_true(rows >= LEAST_ROWS):
        return FEW_ROWS.format(rows=rows) if isinstance(rows, int) else ROWS_VARY
    return None if statically_known_true(columns % OF_COLUMNS == 0) else COLUMNS.format(columns=columns)


def product_of_codes(dtype: torch.dtype) -> Callable[..., Tensor]:
    """``(codes, codes, scale, scale, bias if there is one)`` as the matmul's result."""

    def int_mm(a: Tensor, b: Tensor, inv_a: Tensor, inv_b: Tensor, *bias: Tensor) -> Tensor:
        return int8_product(a, b, inv_a, inv_b, dtype, *bias)

    return int_mm
