"""Codecs of every kind, and what they are tried on."""

from __future__ import annotations

import itertools
import math

import torch

from fp8compile.numerics import Groupwise, GroupwiseBest, Rowwise, Tensorwise
from tests.support.reference import FORMATS, SCALE_DTYPES, reference_scale

FP32_MAX = torch.finfo(torch.float32).max

BEST_SCALE_DTYPES = (torch.float32, torch.bfloat16)  # E8M0 has no sign to name the format with


def label(value):
    return f"{value.name} {value.scale_dtype}".replace("torch.", "") if hasattr(value, "name") else str(value)


def groupwise(group_size):
    """Groupwise in each format and scale dtype, and GroupwiseBest."""
    single = (Groupwise(f, group_size, s) for f, s in itertools.product(FORMATS, SCALE_DTYPES))
    return [*single, *(GroupwiseBest(group_size, s) for s in BEST_SCALE_DTYPES)]


TENSORWISE = [Tensorwise(f, s) for f, s in itertools.product(FORMATS, SCALE_DTYPES)]

ROWWISE = [Rowwise(f, s) for f, s in itertools.product(FORMATS, SCALE_DTYPES)]

EVERY_CODEC = [*TENSORWISE, *ROWWISE, *groupwise(128)]


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def scale_of_each(codec, inv_scale, like):
    """The inverse scale of each element, signed as stored, in float64."""
    scale = reference_scale(inv_scale)
    if isinstance(codec, Groupwise | GroupwiseBest):
        return of_each_element(scale, lengths_of_groups(like.shape, codec.group_size), like)
    return scale.expand(like.shape)


def of_each_element(per_group, lengths, like):
    """What each group has, for each of its elements."""
    return per_group.reshape(-1).repeat_interleave(torch.tensor(lengths, dtype=torch.int64)).reshape(like.shape)


def length_of_row(shape):
    """The last sizes of ``shape`` that have 16 elements or more, multiplied; all of them where they have fewer."""
    row = 1
    for size in reversed(shape):
        row *= size
        if row >= 16:
            break
    return row


def lengths_of_groups(shape, group_size):
    """How many elements each group has, in contiguous order: rows one after the other, each cut by itself."""
    row = length_of_row(shape)
    return cut(row, group_size) * (math.prod(shape) // row) if row else []


def cut(row, group_size):
    """A row in as many equal groups as divide it, up to a third (16 at most) above what it needs; else a short last one."""
    needed = math.ceil(row / group_size)
    for count in range(needed, needed + min(math.ceil(needed / 3), 16) + 1):
        if row % count == 0:
            return [row // count] * count
    return [group_size] * (row // group_size) + [row % group_size]


def few_bits_lengths(shape, group_size):
    """The groups of ``FewBits``: where there are several in a row, equal ones are of a multiple of 8."""
    row = length_of_row(shape)
    if not row:
        return []
    parts = cut(row, group_size)
    if len(parts) > 1 and parts[0] % 8:
        parts = [group_size] * (row // group_size) + [row % group_size] * (row % group_size > 0)
    return parts * (math.prod(shape) // row)


def decoded(codec, x, dtype=torch.float32):
    return codec.decode(*codec.encode(x), dtype)


SHAPES = [(), (0,), (3, 0), (0, 5), (1,), (127,), (128,), (129,), (2, 64), (3, 100), (4, 3, 43), (1, 600)]

GROUP_SIZES = (1, 16, 64, 128, 300)


def raw_parts(codes):
    """Codes as bytes, which compare equal where they are."""
    return codes.view(torch.uint8)
