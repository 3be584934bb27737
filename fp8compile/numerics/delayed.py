"""Delayed scaling: codes under a scale that was known before the tensor (Micikevicius et al. 2022; Transformer Engine).

    inv_scale = 2**margin * max(amaxes of the last steps) / max
    code      = saturate(x / inv_scale), NaN where x is inf or NaN
    clipped   = how many finite x are so large that saturation costs them more than rounding would
    history   = the last amaxes, newest first; an amax that is inf or NaN is left out

A known scale saves the pass over x that finds its amax. In return it may be stale: too small a scale clips, so clipping is
counted. Saturation would hide an inf, so an inf becomes a NaN: E4M3 has no inf.

An operand of which too much is clipped (``falls_back``) forgets its history but for the amax just seen, or one outlier
would keep its scale too coarse for as many steps as the history is long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fp8compile.numerics.formats import Format
from fp8compile.numerics.scaling import SMALLEST_INV_SCALE, inv_scale_value, may_be_empty

AMAX, CLIPPED, NON_FINITE, ELEMENTS = range(4)  # columns of an operand's statistics, float32
COLUMNS = 4  # a row of statistics or scales is 16 bytes, as cuBLASLt aligns what it reads
CLIPPED_TOO_MUCH = 1e-5  # as a fraction of a tensor's elements, beyond
CLIPPED_FEW = 16  # elements: in small tensors each new largest value would else be too much
COMPUTES = ("max", "most_recent")


def quantize_under(x: Tensor, inv_scale: Tensor, fmt: Format) -> Tensor:
    """Codes of x, any shape, under a scale (one number) that may be stale: saturating, NaN where x is inf or NaN."""
    scaled = x.float() * inv_scale_value(inv_scale).reshape(()).reciprocal()
    return torch.where(x.abs() < torch.inf, scaled.clamp(-fmt.max, fmt.max), torch.nan).to(fmt.dtype)


def clips_above(fmt: Format) -> float:
    """The largest ``|x| / inv_scale`` that costs no more than rounding: half a step above ``fmt.max``, 464 in E4M3."""
    step = 2.0 ** math.floor(math.log2(fmt.max)) * 2 * fmt.half_ulp
    return fmt.max + step / 2


def partial_statistics(x: Tensor, scale: Tensor, fmt: Format) -> tuple[Tensor, Tensor, Tensor]:
    """For each row of x, ``[M, N] -> [M]`` in FP32: its amax (inf or NaN where it holds one), how many finite elements are
    clipped where x is multiplied by ``scale``, how many are not finite. All three fit into the kernel that makes x."""
    if may_be_empty(x.numel()):
        x = torch.nn.functional.pad(x, (0, 0, 0, 1))
    size = x.abs()
    finite = size < torch.inf
    clipped = (size.float() * scale.reshape(()) > clips_above(fmt)) & finite
    clips, lost = (torch.where(each, 1.0, 0.0).sum(-1) for each in (clipped, finite.logical_not()))
    return size.amax(-1).float(), clips, lost


def total_statistics(partials: Sequence[tuple[Tensor, ...]], widths: Sequence[int]) -> Tensor:
    """``[V, COLUMNS]``: the statistics of V matrices of equally many rows, from partial ones and their numbers of columns.

    All partial statistics lie in one tensor, which is reduced by two reductions in one kernel: of each row one is taken.
    """
    kinds, rows = list(zip(*partials, strict=True)), partials[0][0].shape[0]
    whole = torch.cat([part for kind in kinds for part in kind]).reshape(len(kinds), len(partials), rows)
    (amaxes, _, _), (_, clipped, non_finite) = whole.amax(-1).unbind(), whole.sum(-1).unbind()
    one = torch.mul(amaxes.new_ones(()), rows)
    elements = torch.stack([one * width for width in widths])
    return torch.stack([amaxes, clipped, non_finite, elements], -1)


def placed(parts: Sequence[Tensor], late: Sequence[bool], half: int) -> Tensor:
    """``[2 * half, COLUMNS]``: each of the parts ``[V, COLUMNS]`` at the top of the upper half or, if late, of the lower."""
    padded = {
        is_late: torch.nn.functional.pad(part, (0, 0, 0, half - part.shape[0]))
        for part, is_late in zip(parts, late, strict=True)
    }
    nothing = parts[0].new_zeros(half, COLUMNS)
    return torch.cat([padded.get(is_late, nothing) for is_late in (False, True)])


def falls_back(statistics: Tensor) -> Tensor:
    """By row of ``[V, COLUMNS]``, whether so much was clipped that the next step must not use a known scale."""
    return statistics[:, CLIPPED] > CLIPPED_FEW + CLIPPED_TOO_MUCH * statistics[:, ELEMENTS]


def next_history(history: Tensor, statistics: Tensor) -> Tensor:
    """The history ``[V, length]`` with the amaxes of ``[V, COLUMNS]`` in front; nothing else of an operand that fell back."""
    amax = statistics[:, AMAX, None]
    pushed = torch.cat([amax, history[:, :-1]], 1)
    alone = torch.nn.functional.pad(amax, (0, history.shape[1] - 1))
    pushed = torch.where(falls_back(statistics)[:, None], alone, pushed)
    return torch.where(amax < torch.inf, pushed, history)  # NaN compares False too


def inv_scale_from(history: Tensor, largest: Tensor, compute: str = "max", margin: int = 0) -> Tensor:
    """The scales ``[V]``, FP32, for the next step, from the history ``[V, length]`` and each format's max ``[V]``.

    ``compute`` is one of ``COMPUTES``. An operand that was all zeros so far gets the smallest scale: what comes next is
    clipped to nearly zero once, which is counted, and the step after that takes its amax.
    """
    amax = history[:, 0] if compute == "most_recent" else history.amax(1)
    return (amax / largest * 2.0**margin).clamp(SMALLEST_INV_SCALE, torch.finfo(torch.float32).max)
