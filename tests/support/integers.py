"""Linears in INT8: what is told of them, and their products by hand."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fp8compile
from fp8compile.numerics import INT8, Rowwise
from fp8compile.numerics.integer_products import int8_product
from fp8compile.recipe.recipe import Recipe
from fp8compile.reporting.entries import Linear, Skip
from tests.support.measure import matmul_entries

ROWS = Rowwise(INT8)


def linears_of(model: nn.Module, *args: Tensor, **fields: object) -> list[Linear | Skip]:
    recipe = Recipe(**{"linears": "int8", **fields})  # type: ignore[arg-type]
    return matmul_entries(fp8compile.explain(model, args, recipe=recipe))


def product(x: Tensor, w: Tensor, added: Tensor | None = None) -> Tensor:
    """``x [M, K]`` by ``w [N, K]`` transposed, both encoded by rows."""
    (a, inv_a), (b, inv_b) = ROWS.encode(x.detach()), ROWS.encode(w.detach())
    return int8_product(a, b.t(), inv_a, inv_b.t(), x.dtype, added)


class OnTheLeft(nn.Module):
    """A linear whose weight is multiplied from the left."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(80, 144) * torch.logspace(-2, 2, 144))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight @ x
