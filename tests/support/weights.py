"""Weights and updates that split weights are tried on."""

from __future__ import annotations

import math

import torch

from fp8compile.numerics.states.split_weights import joined, split
from tests.support.reference import TWO_BYTE_DTYPES, finite_values, random_positive_fp32


def masters():
    """FP32 of every magnitude, both signs, beside all values of both dtypes and half way between, and non-finite ones."""
    values = [finite_values(dtype).float() for dtype in TWO_BYTE_DTYPES]
    half_way = [(each[:-1].double() + each[1:].double()).div(2).float() for each in values]
    beside = [torch.nextafter(each, torch.zeros(())) for each in (*values, *half_way)]
    special = torch.tensor([math.inf, -math.inf, math.nan, torch.finfo(torch.float32).max, 65519.9, 65520.0])
    x = random_positive_fp32(200_000)
    weights = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * 0.02
    return torch.cat([*values, *half_way, *beside, x, -x, weights, special])


def both_ways(master):
    """All that is stored for both dtypes, and what it stands for."""
    stored = [split(master, dtype) for dtype in TWO_BYTE_DTYPES]
    return *(part for parts in stored for part in parts), *(joined(*parts) for parts in stored)
