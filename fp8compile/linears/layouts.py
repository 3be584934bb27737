"""Codes as ``_scaled_mm`` takes them: the left operand row by row in memory, the right one column by column."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8compile.fx.graph import size_hint
from fp8compile.fx.tracing import stored
from fp8compile.numerics import Rowwise
from fp8compile.numerics.formats import FP8_MULTIPLE
from fp8compile.numerics.scaling import quantize


def encoded_along(codec: Rowwise, x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """A matrix under one scale for each of its rows (``axis`` 1) or columns (0): codes in its shape, and scales.

    By columns, the codes that a CPU multiplies stay in the matrix's order in memory, the others are stored column by column.
    """
    if axis == 1:
        return codec.encode(x)
    if takes_any_order(x, codec.format.dtype):
        inv_scale = codec.inv_scale(x.t()).t()
        return quantize(x, inv_scale, codec.format), inv_scale
    codes, inv_scale = codec.encode(x.t())
    return codes.t(), inv_scale.t()


def takes_any_order(value: Tensor, dtype: torch.dtype) -> bool:
    """Whether a matmul of codes takes them in any order: ``_int_mm`` on a CPU, where no order is slower than another."""
    return dtype == torch.int8 and value.device.type == "cpu"


def as_matrix(codes: Tensor) -> Tensor:
    """Codes ``[..., C]`` as ``[rows, C]``."""
    return codes if codes.dim() == 2 else codes.reshape(-1, codes.shape[-1])


def stored_matrix(codes: Tensor) -> Tensor:
    """Codes ``[..., C]`` as ``[rows, C]``, stored once in the shape that they have."""
    return as_matrix(stored(codes))


def by_columns(value: Tensor) -> Tensor:
    """A value ``[..., C]`` as ``[C, ...]``: the transpose of its matrix."""
    return value.permute(-1, *range(value.dim() - 1))


def as_operand(codes: Tensor, left: bool, across: bool) -> Tensor:
    """Codes stored row by row, as the left operand or as the right one; ``across``: they are ``by_columns``."""
    rows = matrix_in_rows(codes, across)
    return rows if left else rows.t()


def matrix_in_rows(codes: Tensor, across: bool) -> Tensor:
    """``in_rows`` of codes ``[..., C]``, or ``across`` ``[C, ...]``, as a matrix, stored in the shape that they have."""
    matrix = (codes.shape[0], -1) if across else (-1, codes.shape[-1])
    contracted = math.prod(codes.shape[1:] if across else codes.shape[-1:])
    if codes.dim() == 2 or not statically_known_true(contracted % FP8_MULTIPLE == 0):
        return in_rows(codes.reshape(matrix) if codes.dim() > 2 else codes, True)
    return stored(codes.contiguous()).reshape(matrix)


def in_rows(codes: Tensor, once: bool) -> Tensor:
    """Codes row by row in memory, each row padded with zeros to FP8_MULTIPLE; ``once``: stored once for all who read them."""
    if not statically_known_true(codes.shape[1] % FP8_MULTIPLE == 0):
        raw = codes.view(torch.uint8) if codes.is_contiguous() else codes.contiguous().view(torch.uint8)
        codes = torch.nn.functional.pad(raw, (0, -codes.shape[1] % FP8_MULTIPLE)).view(codes.dtype)
    return stored(codes.contiguous()) if once else codes.contiguous()


def is_in_order(side: str, codes: Node) -> bool:
    """Whether ``_scaled_mm`` takes codes in this layout: left row-major, right column-major, contracted by FP8_MULTIPLE.

    INT8 goes to a GPU in the same.
    """
    if takes_any_order(codes.meta["val"], codes.meta["val"].dtype):
        return True
    value, contracted = codes.meta["val"], 1 if side == "left" else 0
    whole = statically_known_true(value.shape[contracted] % FP8_MULTIPLE == 0)
    step = size_hint(value.stride(1 - contracted))
    return whole and size_hint(value.stride(contracted)) == 1 and step >= size_hint(value.shape[contracted])
