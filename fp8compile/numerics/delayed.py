"""Delayed scaling: codes under a scale that was known before the tensor (Micikevicius et al. 2022; Transformer Engine).

    inv_scale = 2**margin * max(amaxes of the last steps) / max
    code      = saturate(x / inv_scale), NaN where x is inf or NaN
    clipped   = how many finite x are so large that saturation costs them more than rounding would
    history   = the last amaxes of passes in which x was used, newest first; 0, inf and NaN are left out

A known scale saves the pass over x that finds its amax. In return it may be stale: too small a scale clips, so clipping is
counted. Saturation would hide an inf, so an inf becomes a NaN: E4M3 has no inf.

An amax of 0 says nothing of the next pass: an expert that did not run, labels that are all ignored, a weight before its first
step. Any scale is right for zeros. So they push nothing out of the history, and 0 in it means that nothing is known.

Of an operand that is unknown no scale is surely right but its own. So steps measure while there is one, as long as it seems
to be about to come: for ``PATIENCE`` passes, and for twice the time that the last one took, if one came after that. Then it
has the scale of the largest operand of its kind (``or_amax_of_kind``).

An operand of which too much is clipped (``falls_back``) forgets its history but for the amax just seen, or one outlier
would keep its scale too coarse for as many steps as the history is long. Gradients that were made after it were computed
from clipped codes. The next pass that is as large may be another than the one that measures, so their entries are enlarged
(``grown_by``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8compile.numerics.formats import Format
from fp8compile.numerics.scaling import SMALLEST_INV_SCALE, inv_scale_value, may_be_empty

AMAX, CLIPPED, NON_FINITE, ELEMENTS = range(4)  # columns of an operand's statistics, float32
COLUMNS = 4  # a row of statistics or scales is 16 bytes, as cuBLASLt aligns what it reads
CLIPPED_TOO_MUCH = 1e-5  # as a fraction of a tensor's elements, beyond
CLIPPED_FEW = 16  # elements: in small tensors each new largest value would else be too much
UNROLLED = 4  # Inductor writes reductions of fewer than 8 elements out
# Larger than what is left of a value that was clipped under the smallest scale, and went through matmuls.
TRACE = 2.0**-64
PATIENCE, LONGEST = 32, 1024  # backward passes: what is 0 for longer must not keep a graph without generated code


def quantize_under(x: Tensor, inv_scale: Tensor, fmt: Format) -> Tensor:
    """Codes of x, any shape, under a scale (one number) that may be stale: saturating, NaN where x is inf or NaN."""
    scaled = x.float() * inv_scale_value(inv_scale).reshape(()).reciprocal()
    return torch.where(x.abs() < torch.inf, scaled.clamp(-fmt.max, fmt.max), torch.nan).to(fmt.dtype)


def clips_above(fmt: Format) -> float:
    """The largest ``|x| / inv_scale`` that costs no more than rounding: half a step above ``fmt.max``, 464 in E4M3."""
    step = 2.0 ** math.floor(math.log2(fmt.max)) * 2 * fmt.half_ulp
    return fmt.max + step / 2


def partial_statistics(x: Tensor, scale: Tensor, fmt: Format, dim: int = -1) -> tuple[Tensor, Tensor, Tensor]:
    """For each row of x, ``[..., N] -> [...]`` in FP32: its amax (inf or NaN where it holds one), how many finite elements
    are clipped where x is multiplied by ``scale``, how many are not finite. All three fit into the kernel that makes x.

    ``dim=-2`` takes them down columns, ``[..., R, C] -> [..., C]``. Totals are the same: an amax is a maximum, and a count a
    sum of ones.
    """
    if may_be_empty(x.numel()):
        x = torch.nn.functional.pad(x.reshape(-1, x.shape[-1]), (0, 0, 0, 1))
    size = x.abs()
    finite = size < torch.inf
    clipped = (size.float() * scale.reshape(()) > clips_above(fmt)) & finite
    clips, lost = (torch.where(each, 1.0, 0.0).sum(dim) for each in (clipped, finite.logical_not()))
    return size.float().amax(dim), clips, lost


def total_statistics(partials: Sequence[tuple[Tensor, ...]], widths: Sequence[int]) -> Tensor:
    """``[V, COLUMNS]``: the statistics of V tensors, from partial ones of one shape and their numbers of columns.

    All partial statistics lie in one tensor, which two reductions in one kernel make short. What is left is one kernel
    without loops: reductions of UNROLLED elements, and no ``cat``.
    """
    kinds, rows = list(zip(*partials, strict=True)), math.prod(partials[0][0].shape)
    short = UNROLLED if statically_known_true(rows % UNROLLED == 0) else 1
    whole = torch.cat([part for kind in kinds for part in kind]).reshape(len(kinds), len(partials), short, -1)
    amaxes, _, _ = whole.amax(-1).amax(-1, keepdim=True).unbind()
    _, clipped, non_finite = whole.sum(-1).sum(-1, keepdim=True).unbind()
    column, width = torch.arange(COLUMNS, device=amaxes.device), _by_row(widths, amaxes)
    counts = torch.where(column == NON_FINITE, non_finite, torch.mul(width, rows))
    return torch.where(column == AMAX, amaxes, torch.where(column == CLIPPED, clipped, counts))


def _by_row(numbers: Sequence[int], like: Tensor) -> Tensor:
    """``[V, 1]``: these numbers, in the dtype and on the device of ``like``."""
    row = torch.arange(len(numbers), device=like.device).unsqueeze(-1)
    found = torch.zeros_like(row, dtype=like.dtype)
    for number in dict.fromkeys(numbers):
        for i, each in enumerate(numbers):
            found = torch.where(row == i, float(number), found) if each == number else found
    return found


def placed(parts: Sequence[Tensor], late: Sequence[bool], half: int) -> Tensor:
    """``[2 * half, COLUMNS]``: each of the parts ``[V, COLUMNS]`` at the top of the upper half or, if late, of the lower."""
    rows = [
        (is_late * half, 2 * half - is_late * half - part.shape[0]) for part, is_late in zip(parts, late, strict=True)
    ]
    padded = [torch.nn.functional.pad(part, (0, 0, *around)) for part, around in zip(parts, rows, strict=True)]
    return sum(padded[1:], start=padded[0])


def falls_back(statistics: Tensor) -> Tensor:
    """By row of ``[V, COLUMNS]``, whether so much was clipped that the next step must not use a known scale."""
    return statistics[:, CLIPPED] > CLIPPED_FEW + CLIPPED_TOO_MUCH * statistics[:, ELEMENTS]


def entry_of(statistics: Tensor, unknown: Tensor) -> Tensor:
    """By row of ``[V, COLUMNS]``, the amax that the history learns; 0 for nothing, of zeros and of what is not finite.

    ``unknown``: bool ``[V]``. Where one of these was clipped, others are computed from what is left of it, and learn nothing.
    """
    amax = statistics[:, AMAX]
    lost = unknown & (unknown & (statistics[:, CLIPPED] > 0)).any()
    return torch.where((amax < torch.inf) & ~(lost & (amax < TRACE)), amax, 0.0)  # NaN compares False too


def grown_by(amax: Tensor, inv_scale: Tensor, largest: Tensor, fell_back: Tensor, before: Tensor) -> Tensor:
    """``[V + 1]``: by how much larger each amax may be where what was made before it is not clipped; 1 where nothing was.

    All ``[V]``, of gradients in the order in which one backward makes them; ``before`` is that of what it made before, and
    the last that of what comes after. A backward is linear, and a code is at least ``inv_scale * largest / amax`` of its
    value. So what is computed from clipped codes lacks that factor at most, but for what cancels. One that was unknown is
    left out: under the smallest scale nothing of it was left.
    """
    counts = fell_back & (amax < torch.inf) & (inv_scale > SMALLEST_INV_SCALE)
    growth = torch.where(counts, amax / (inv_scale * largest), 1.0)
    return torch.cat([before.reshape(1), growth]).cummax(0).values


def next_history(history: Tensor, entry: Tensor, fell_back: Tensor) -> Tensor:
    """The history ``[V, length]`` with the entries ``[V]`` in front, where they are not 0; nothing else of an operand that
    fell back, bool ``[V]``."""
    first = entry[:, None]
    pushed = torch.cat([first, history[:, :-1]], 1)
    alone = torch.nn.functional.pad(first, (0, history.shape[1] - 1))
    return torch.where(first > 0, torch.where(fell_back[:, None], alone, pushed), history)


def without_zeros(history: Tensor) -> Tensor:
    """The history ``[V, length]`` with what is 0 behind all else, otherwise in its order."""
    return history.gather(1, (history == 0).int().argsort(dim=1, stable=True))


def is_unknown(history: Tensor) -> Tensor:
    """Bool ``[V]``: of which operands the history ``[V, length]`` holds nothing."""
    return history.amax(1) == 0


def next_patience(patience: Tensor, awoke: Tensor) -> Tensor:
    """Int64 ``[2]``: how many passes ago an unknown operand had a value, and for how many the others are waited for."""
    ago, most = patience.unbind()
    return torch.where(
        awoke, torch.stack([ago * 0, (2 * ago).clamp(PATIENCE, LONGEST)]), torch.stack([ago + 1, most])
    )


def or_amax_of_kind(amax: Tensor, kinds: Tensor) -> Tensor:
    """``amax`` ``[V]`` and, where it is 0, the largest one of its kind, int64 ``[V]`` from 0 to V - 1; 0 where all are 0.

    An operand that comes after all is seldom larger than all others of its kind. Where it is smaller, a float format still
    holds it: E5M2 has 29 binades of full precision, E4M3 has 14.
    """
    largest = torch.zeros_like(amax).scatter_reduce(0, kinds, amax, "amax")
    return torch.where(amax > 0, amax, largest[kinds])


def inv_scale_from(amax: Tensor, largest: Tensor, margin: int = 0) -> Tensor:
    """The scales ``[V]``, FP32, for the next step, from amaxes ``[V]`` and each format's max ``[V]``.

    An operand of which nothing is known, nor of its kind, gets the smallest scale: what comes next is clipped to nearly zero
    once, which is counted, and the step after that takes its amax.
    """
    return (amax / largest * 2.0**margin).clamp(SMALLEST_INV_SCALE, torch.finfo(torch.float32).max)
