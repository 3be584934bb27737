"""Saved masks: truth values take a byte each in torch. They are kept as bits, exactly, where all sizes are known.

A mask that is made from its seed again (``passes/recompute_kept.py``) is not saved, so nothing is packed there. The caller's
own masks cost nothing to keep, and are not asked about (``fp8compile/fx/regions.py``).
"""

from __future__ import annotations

import torch

from fp8compile.fx.graph import NOT_STATIC, sizes_in_memory
from fp8compile.fx.partition import SavedTensor
from fp8compile.numerics.bits import Bits
from fp8compile.saved.stored import Stored


def is_mask(edge: SavedTensor) -> bool:
    """Whether a saved tensor holds truth values."""
    return edge.forward.meta["val"].dtype is torch.bool


def as_bits(edge: SavedTensor) -> Stored | str:
    """How a mask is stored, or why it stays as it is."""
    value = edge.forward.meta["val"]
    static = all(isinstance(size, int) for size in (*value.shape, *sizes_in_memory(value)))
    return Stored(Bits()) if static else f"a mask: {NOT_STATIC}"
