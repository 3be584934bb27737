"""Saved integers: indices of 64 bits are kept in the smallest integer that holds all that they can be, exactly.

What they can be is proven of the forward (``fp8compile/analysis/ranges``): where elements were along a dimension of known
size (topk, sort, argmax, pools), counters, and what is gathered or computed from these. States of random numbers, what the
caller gives, and what nothing bounds stay as they are.
"""

from __future__ import annotations

import torch

from fp8compile.analysis.ranges import Interval
from fp8compile.analysis.ranges.bounds import at_least, at_most
from fp8compile.encoding.stored import Stored
from fp8compile.fx.partition import SavedTensor
from fp8compile.numerics.whole_numbers import narrowest

WIDE = (torch.int16, torch.int32, torch.int64)


def is_wide_integer(edge: SavedTensor) -> bool:
    """Whether a saved tensor holds integers of more than a byte."""
    return edge.forward.meta["val"].dtype in WIDE


def in_fewer_bytes(edge: SavedTensor, proven: Interval | None) -> Stored | None:
    """How integers of which that range is proven are stored; None where they stay as they are."""
    if proven is None:
        return None
    codec = narrowest(at_least(proven.lower), at_most(proven.upper), edge.forward.meta["val"].dtype)
    return Stored(codec) if codec else None
