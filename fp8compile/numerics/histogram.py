"""Statistics of a gradient, for Graphcore's automatic loss scaling (``amp.policies``); numbers in FP16.

    small      elements with |x| <= 2**13          h1
    large      2**13 < |x|, finite                 h2, together with inf and nan
    inf, nan   elements that are
    zero       elements that are 0: all that underflowed, and what was 0 anyway
    subnormal  0 < |x| < 2**-14: FP16 has lost bits of them
    amax       the largest finite |x|, 0 if there is none

The edge stands below FP16's largest value, 65504, because gradients are clipped there, and an overflow inside a sum would
be invisible in its result. Counts are exact and add up over calls, micro-batches and ranks; amax is folded by maximum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8compile.numerics.formats import FP16_NORMAL

EDGE = 2.0**13
COLUMNS = ("small", "large", "inf", "nan", "zero", "subnormal", "amax")
SMALL, LARGE, INF, NAN, ZERO, SUBNORMAL, AMAX = range(len(COLUMNS))
THRESHOLD = 1e-7


@dataclass(frozen=True)
class Edges:
    """Where the columns end, for magnitudes that have not been rounded to their dtype yet.

    Inductor computes in FP32 and rounds where it stores. So these are the FP32 magnitudes that *round to* the edges of
    ``COLUMNS`` (to nearest, ties to even): a count is that of the stored values, wherever it is taken.
    """

    small: float = EDGE  # the largest
    inf: float = float("inf")  # the smallest
    zero: float = 0.0  # the largest
    normal: float = FP16_NORMAL  # the smallest


EDGES = {
    torch.float16: Edges(small=EDGE + 4, inf=65520.0, zero=2.0**-25, normal=FP16_NORMAL - 2.0**-25),
    torch.bfloat16: Edges(
        small=EDGE + 32, inf=(2.0 - 2.0**-8) * 2.0**127, zero=2.0**-134, normal=FP16_NORMAL - 2.0**-23
    ),
    torch.float32: Edges(),
    torch.float64: Edges(),
    torch.complex64: Edges(),
    torch.complex128: Edges(),
}
DOUBLE = (torch.float64, torch.complex128)  # magnitudes that FP32 does not hold


def statistics(x: Tensor) -> Tensor:
    """The seven numbers of ``COLUMNS`` for a tensor of a dtype in ``EDGES``: float64 ``[7]``, exact counts below 2**53.

    In a graph the two halves are separate: ``partials`` in the kernel that makes or reads x, ``totals`` once for many
    values. An empty tensor has all zeros.
    """
    return totals([partials(x)], [x.numel()]).squeeze(0)


def partials(x: Tensor, limit: Tensor | None = None) -> Tensor:
    """``[6, R]``: large, inf, nan, zero, subnormal and amax of each of the R rows of x along its last dimension.

    The dtype is FP32, whose counts are exact up to 2**24 elements a row; float64 for a single row, which may be longer, and
    for x in float64. If x is clipped to ``limit``, 0-d, the elements at the limit count as inf.
    """
    edges, double = EDGES[x.dtype], x.dtype in DOUBLE
    several = x.dim() > 1
    magnitude = x.abs() if double else x.abs().float()
    inf = edges.inf if limit is None else limit.clamp(max=edges.inf)
    finite = magnitude < inf
    which = (
        (magnitude > edges.small) & finite,
        magnitude >= inf,
        magnitude != magnitude,
        magnitude <= edges.zero,
        (magnitude > edges.zero) & (magnitude < edges.normal),
    )
    dims = (-1,) if several else ()
    dtype = torch.float32 if several and not double else torch.float64
    counts = [torch.where(each, 1.0, 0.0).sum(dims, dtype=dtype) for each in which]
    amax = torch.where(finite, magnitude, 0.0)
    amax = (amax.amax(dims) if x.numel() else amax.sum(dims)).to(dtype)
    return torch.stack([each.reshape(-1) for each in (*counts, amax)])


def totals(parts: Sequence[Tensor], numels: Sequence[int]) -> Tensor:
    """Float64 ``[V, 7]`` from the ``partials`` ``[6, R]`` of V values with as many rows each, and their sizes."""
    parts_V6R = torch.stack(list(parts))
    large, inf, nan, zero, subnormal = parts_V6R.narrow(1, 0, 5).double().sum(-1).unbind(1)
    amax = parts_V6R.select(1, 5).amax(-1).double() if parts_V6R.shape[-1] else torch.zeros_like(large)
    numel = torch.cat([large.new_full((1,), size) for size in numels])
    return torch.stack([numel - large - inf - nan, large, inf, nan, zero, subnormal, amax], -1)


def fold(total: Tensor, new: Tensor) -> Tensor:
    """Statistics ``[..., 7]`` of two sets of elements taken together: counts added, amax the larger."""
    return torch.cat([total[..., :AMAX] + new[..., :AMAX], torch.maximum(total[..., AMAX:], new[..., AMAX:])], -1)


def flags(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Float64 ``[V, 7]`` from the largest magnitudes ``[V]`` of V values of ``dtype``, inf and NaN included.

    This is for a value of the forward, where only amax is taken. It shows *whether* there is an inf or a NaN (one of the two
    counts is then 1), and amax, 0 if it is not finite.
    """
    amax, inf = amax.double(), EDGES[dtype].inf
    columns = [torch.zeros_like(amax)] * len(COLUMNS)
    columns[INF], columns[NAN] = torch.where(amax >= inf, 1.0, 0.0), torch.where(amax != amax, 1.0, 0.0)
    columns[AMAX] = torch.where(amax < inf, amax, 0.0)
    return torch.stack([column.double() for column in columns], -1)


def beyond(x: Tensor, edge: float) -> Tensor:
    """x, but 0 where it is in [-edge, edge]; NaN stays. With the largest finite value for an edge, only inf and NaN are left.
    One launch, where a comparison of magnitudes takes two."""
    return torch.nn.functional.hardshrink(x, edge)


def saturate(x: Tensor, limit: Tensor) -> Tensor:
    """x within [-limit, limit], a 0-d float32 tensor: at 65504 an FP16 inf becomes the largest finite value. NaN stays."""
    return torch.minimum(torch.maximum(x.float(), -limit), limit).to(x.dtype)
