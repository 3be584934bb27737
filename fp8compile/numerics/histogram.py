"""Statistics of a gradient, and the loss scale they ask for (Graphcore's automatic loss scaling; numbers in FP16).

    small      elements with |x| <= 2**13          h1
    large      2**13 < |x|, finite                 h2, together with inf and nan
    inf, nan   elements that are
    zero       elements that are 0: all that underflowed, and what was 0 anyway
    subnormal  0 < |x| < 2**-14: FP16 has lost bits of them
    amax       the largest finite |x|, 0 if there is none

    loss scale:  h2 / (h1 + h2) > 1e-7 -> halved, else doubled; h1 + h2 == 0 -> left

The edge stands below FP16's largest value, 65504, because gradients are clipped there, and an overflow inside a sum would
be invisible in its result. Counts are exact and add up over calls, micro-batches and ranks; amax is folded by maximum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

EDGE = 2.0**13
FP16_MAX = 65504.0
COLUMNS = ("small", "large", "inf", "nan", "zero", "subnormal", "amax")
SMALL, LARGE, INF, NAN, ZERO, SUBNORMAL, AMAX = range(len(COLUMNS))
THRESHOLD = 1e-7

_ROW, _SHORT = 1024, 256  # elements of a first, partial sum, wanted and at least: 24 bytes are written for each


@dataclass(frozen=True)
class Edges:
    """Where the columns end, for magnitudes that have not been rounded to their dtype yet.

    Inductor computes in FP32 and rounds where it stores: these are the FP32 magnitudes that *round to* the edges of
    ``COLUMNS`` (to nearest, ties to even), so that a count is that of the stored values wherever it is taken.
    """

    small: float = EDGE  # the largest
    inf: float = float("inf")  # the smallest
    zero: float = 0.0  # the largest
    normal: float = 2.0**-14  # the smallest


EDGES = {
    torch.float16: Edges(small=EDGE + 4, inf=65520.0, zero=2.0**-25, normal=2.0**-14 - 2.0**-25),
    torch.bfloat16: Edges(
        small=EDGE + 32, inf=(2.0 - 2.0**-8) * 2.0**127, zero=2.0**-134, normal=2.0**-14 - 2.0**-23
    ),
    torch.float32: Edges(),
}


def statistics(x: Tensor) -> Tensor:
    """The seven numbers of ``COLUMNS`` for a tensor of a dtype in ``EDGES``: float64 ``[7]``, exact counts below 2**53.

    Two reductions each, the first over trailing dimensions, so that it joins the kernel that makes x (see
    ``scaling.amax_tensorwise``). An empty tensor has all zeros.
    """
    edges, dims = EDGES[x.dtype], _trailing(x)
    magnitude = x.abs().float()
    small, finite, zero = magnitude <= edges.small, magnitude < edges.inf, magnitude <= edges.zero
    which = (
        finite & ~small,
        magnitude >= edges.inf,
        magnitude != magnitude,
        zero,
        (magnitude < edges.normal) & ~zero,
    )
    large, inf, nan, zeros, subnormal = (_count(each, dims) for each in which)
    amax = torch.where(finite, magnitude, 0.0).amax(dims).amax() if x.numel() else magnitude.sum()
    smalls = x.numel() - large - inf - nan
    return torch.stack([smalls, large, inf, nan, zeros, subnormal, amax.double()])


def fold(total: Tensor, new: Tensor) -> Tensor:
    """Statistics ``[..., 7]`` of two sets of elements taken together: counts added, amax the larger."""
    return torch.cat([total[..., :AMAX] + new[..., :AMAX], torch.maximum(total[..., AMAX:], new[..., AMAX:])], -1)


def two_bins(stats: Tensor) -> tuple[Tensor, Tensor]:
    """``[..., 7]`` -> h1 and h2, summed over all rows. inf and NaN belong to h2: they were large once."""
    sums = stats.reshape(-1, len(COLUMNS)).sum(0)
    return sums[SMALL], sums[LARGE] + sums[INF] + sums[NAN]


def next_scale(
    scale: Tensor, h1: Tensor, h2: Tensor, floor: float, ceiling: float, threshold: float = THRESHOLD
) -> Tensor:
    """The loss scale after an update that saw ``h1`` small and ``h2`` large gradients, within [floor, ceiling].

    All tensors are 0-d; the division is spared, so that no gradients (h1 + h2 = 0) leave the scale as it is.
    """
    factor = torch.where(h2 > threshold * (h1 + h2), 0.5, 2.0)
    factor = torch.where(h1 + h2 > 0, factor, 1.0)
    return (scale * factor.to(scale.dtype)).clamp(floor, ceiling)


def saturate(x: Tensor, limit: Tensor) -> Tensor:
    """x within [-limit, limit], a 0-d float32 tensor: at 65504 an FP16 inf becomes the largest finite value. NaN stays."""
    return torch.minimum(torch.maximum(x.float(), -limit), limit).to(x.dtype)


def _trailing(x: Tensor) -> tuple[int, ...]:
    """The dimensions of a row: trailing ones of ``_ROW`` elements together, never the first. All, where rows are short.

    A symbolic size counts as long: to ask it would tie the compiled code to the answer.
    """
    dims: list[int] = []
    length = 1
    for dim in range(x.dim() - 1, 0, -1):
        size = x.shape[dim]
        dims.append(dim)
        length *= size if type(size) is int else _ROW
        if length >= _ROW:
            break
    return tuple(dims) if length >= _SHORT else tuple(range(x.dim()))


def _count(which: Tensor, dims: tuple[int, ...]) -> Tensor:
    """How many, float64. A row is counted in FP32, exactly up to 2**24; rows are added in float64."""
    if which.dim() > len(dims):
        return torch.where(which, 1.0, 0.0).sum(dims).double().sum()
    return which.sum(dtype=torch.int64).double()  # one row, as long as it likes
