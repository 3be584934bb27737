"""Changes of a sample's activation from epoch to epoch: AQ-SGD (Wang et al. 2022, arXiv 2206.01299).

    m         the message of a sample: what both ends of a link hold of its activation, two bytes for each element
    first     sent = code(a)          received = a'           m <- a'        code: the first visit's, of many bits
    later     sent = code(a - m)      received = m + d        m <- m + d     code: of few bits; d = the change as decoded

The sender decodes what it sends and does the same sum as the receiver, so both have the same m, bit for bit. An error is not
carried on: the next change has it in it. What is received is as far from a as the code is from the change: half a step at
most, and a step is the range of the change, not of the activation, over 2**bits - 1. Of an activation that stands still, the
error falls by that factor with every visit, down to the rounding of m.

That gains where an activation changes less between visits than it is large. Dropout before a link, or an augmentation, makes
a change of its own at every visit, whose range is nearly the activation's: little is gained then.

What is not finite is received as NaN, and leaves m as it was (0 on a first visit): one overflow does not spoil a sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8compile.numerics.formats import FP16_MAX

_ODD = 0x5851F42D4C957F2D  # Knuth's multiplier of a 64-bit congruential generator


def change(a: Tensor, m: Tensor) -> Tensor:
    """a - m in FP32."""
    return a.float() - m.float()


def moved(m: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """``(received, m)`` after a change d, FP32: both in m's dtype, equal where they are finite."""
    received = m.float() + d
    if m.dtype == torch.float16:
        received = received.clamp(-FP16_MAX, FP16_MAX)
    received = received.to(m.dtype)
    return received, torch.where(received.isfinite(), received, m)


def started(received: Tensor, dtype: torch.dtype) -> Tensor:
    """m after a first visit, in ``dtype``; 0 where that is not finite."""
    m = received.to(dtype)
    return torch.where(m.isfinite(), m, 0.0)


def checksum(m: Tensor, ids: Sequence[int]) -> Tensor:
    """int64 ``[1]``: the same on both ends if their messages are, in every bit and place, and belong to the same samples.

    m: of two-byte elements, the rows of these samples.
    """
    bits = m.contiguous().view(-1).view(torch.int16).long()
    places = torch.arange(bits.numel(), device=m.device)
    samples = torch.tensor([*ids], dtype=torch.int64, device=m.device)
    return (_mixed(bits + 40_961, places).sum() + _mixed(samples, places[: len(samples)] + 1).sum()).reshape(1)


def _mixed(words: Tensor, places: Tensor) -> Tensor:
    """Of integers and where they stand, mod 2**64."""
    word = words * (places * 2 + 1) * _ODD
    return (word ^ (word >> 29)) * _ODD
