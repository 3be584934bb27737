"""Codes for grouped matmuls: matrices whose rows belong to experts, those of one beside one another.

    ends [E]     the first row behind each expert's; expert g has rows ends[g - 1] .. ends[g] - 1, maybe none
    y   = x W_g        [T, K] x [E, K, N], contracted along K: a scale for each row of x, for each column of each W_g
    dW_g = dy_g' x_g   contracted along the rows of g: a scale for each column of the part of dy and of x that is g's

The scales are those of torchao's MoE training (torchao/prototype/moe_training/scaled_grouped_mm.py), which
``torch._scaled_grouped_mm`` takes: FP32, ``[T]`` and ``[E, N]``; ``[E * N]`` and ``[E * K]``, expert by expert.

A kernel loads 16 bytes at once, so where rows are contracted each expert's part begins at a multiple of 16 codes:

    place of row t of expert g     t - start_g + sum over h < g of p_h,   p_h = its rows up to a multiple of 16, 16 at least

What lies between are zeros, which add nothing to the product. Rows behind the last expert's are no one's: whatever they hold
counts in no scale and in no product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8compile.numerics.formats import FP8_MULTIPLE, Format
from fp8compile.numerics.scaling import dequantize, quantize


def experts_of_rows(ends_E: Tensor, rows: int) -> Tensor:
    """``[rows]``: the expert that each row belongs to; E for rows behind the last expert's."""
    at = torch.arange(rows, device=ends_E.device, dtype=ends_E.dtype)
    return torch.searchsorted(ends_E, at, right=True, out_int32=True)


def amax_of_parts(x_TN: Tensor, expert_T: Tensor, experts: int) -> Tensor:
    """``[experts + 1, N]``: the largest magnitude in each column of each expert's rows, and of those behind; 0 without rows,
    NaN where one is NaN."""
    amax = x_TN.new_zeros(experts + 1, x_TN.shape[1])
    return amax.scatter_reduce(0, expert_T.long().unsqueeze(-1).expand(x_TN.shape), x_TN.abs(), "amax")


def encode_parts(x_TN: Tensor, expert_T: Tensor, inv_scale_EN: Tensor, fmt: Format) -> Tensor:
    """Codes ``[T, N]`` under the inverse scale of each column of each part, in the shape of ``amax_of_parts``."""
    return quantize(x_TN, _rows(inv_scale_EN, expert_T), fmt)


def decode_parts(codes_TN: Tensor, inv_scale_EN: Tensor, expert_T: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrix that codes of ``encode_parts`` stand for."""
    return dequantize(codes_TN, _rows(inv_scale_EN, expert_T), dtype)


def places_of_parts(ends_E: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where rows lie when each expert's begin at a multiple of ``FP8_MULTIPLE``.

    Returns:
        For each place the row that lies there, whether one does, and the first place behind each expert's.
    """
    experts = ends_E.shape[0]
    counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    taken_E = ((counts_E + FP8_MULTIPLE - 1) // FP8_MULTIPLE).clamp_min(1) * FP8_MULTIPLE
    behind_E = taken_E.cumsum(0, dtype=ends_E.dtype)
    places = (rows + FP8_MULTIPLE - 1) // FP8_MULTIPLE * FP8_MULTIPLE + experts * FP8_MULTIPLE
    at_P = torch.arange(places, device=ends_E.device, dtype=ends_E.dtype)
    expert_P = experts_of_rows(behind_E, places).clamp_max(experts - 1)
    later_E = behind_E - taken_E - (ends_E - counts_E)  # by how many places an expert's rows lie further back
    row_P = at_P - _rows(later_E, expert_P)
    return row_P.clamp_max(rows - 1), row_P < _rows(ends_E, expert_P), behind_E


def place_parts(codes_TN: Tensor, row_P: Tensor, is_there_P: Tensor) -> Tensor:
    """``[P, N]``: the codes of each row at its place, zeros between them; a matmul takes the transpose."""
    raw_PN = _rows(codes_TN.view(torch.uint8), row_P)
    return torch.where(is_there_P.unsqueeze(1), raw_PN, 0).view(codes_TN.dtype)


def _rows(x: Tensor, at: Tensor) -> Tensor:
    """``x[at]``, as the operation that it is in a graph."""
    rows: Tensor = torch.ops.aten.index(x, [at])
    return rows
