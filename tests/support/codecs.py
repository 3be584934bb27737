"""Codecs of every kind, and what they are tried on."""

from __future__ import annotations

import itertools

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
        return scale.reshape(-1).repeat_interleave(codec.group_size)[: like.numel()].reshape(like.shape)
    return scale.expand(like.shape)


def decoded(codec, x, dtype=torch.float32):
    return codec.decode(*codec.encode(x), dtype)


SHAPES = [(), (0,), (3, 0), (0, 5), (1,), (127,), (128,), (129,), (2, 64), (3, 100), (4, 3, 43), (1, 600)]

GROUP_SIZES = (1, 16, 64, 128, 300)
