"""Saved integers: indices of 64 bits are kept in the smallest integer that holds all that they can be, exactly.

What they can be is proven of the forward (``fp8compile/analysis/ranges``): where elements were along a dimension of known
size (topk, sort, argmax, pools), counters, and what is gathered or computed from these. States of random numbers, what the
caller gives, and what nothing bounds stay as they are. So does what was cast from floats: a range speaks of numbers, and a
NaN becomes an integer outside of it.

Where a generated kernel makes the integers, it stores them narrow. What a library's kernel makes (topk, a long sort) takes
one kernel more, some 3 us of a GPU and 20 us of its host: that is done for ``WORTH_A_KERNEL`` bytes, not for fewer.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import Node

from fp8compile.analysis.ranges import Interval
from fp8compile.analysis.ranges.bounds import at_least, at_most
from fp8compile.fx.graph import nbytes, sizes_in_memory, storage_root
from fp8compile.fx.ops import CASTS, is_generated, opname
from fp8compile.fx.partition import SavedTensor
from fp8compile.numerics.whole_numbers import narrowest
from fp8compile.saved.stored import Stored

WIDE = (torch.int16, torch.int32, torch.int64)
WORTH_A_KERNEL = 1 << 20
SCANS = ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp")


def is_wide_integer(edge: SavedTensor) -> bool:
    """Whether a saved tensor holds integers of more than a byte."""
    return edge.forward.meta["val"].dtype in WIDE


def in_fewer_bytes(edge: SavedTensor, ranges: Mapping[Node, Interval]) -> Stored | str | None:
    """How integers are stored whose range is proven, or why not so; None where nothing narrower holds them."""
    proven, value = ranges.get(edge.forward), edge.forward.meta["val"]
    codec = proven and narrowest(at_least(proven.lower), at_most(proven.upper), value.dtype)
    if not codec or _was_cast_from_floats(edge.forward):
        return None
    less = nbytes(value) - codec.nbytes(sizes_in_memory(value))
    if not _may_be_stored_narrow(storage_root(edge.forward)) and less < WORTH_A_KERNEL:
        reason = f"{value.dtype} in {codec.narrow}: {less:,} bytes fewer, not worth a kernel of its own"
        return reason.replace("torch.", "")
    return Stored(codec)


def _was_cast_from_floats(node: Node) -> bool:
    """Whether integers that a value is made of are floats without their fractions; truth values are 0 or 1 in any case."""
    seen, waiting = {node}, [node]
    while waiting:
        node = waiting.pop()
        for parent in set(node.all_input_nodes) - seen:
            value = parent.meta.get("val")
            is_float = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
            if is_float and node.target in CASTS:
                return True
            if not is_float and not (isinstance(value, torch.Tensor) and value.dtype is torch.bool):
                seen.add(parent)
                waiting.append(parent)
    return False


def _may_be_stored_narrow(made: Node) -> bool:
    """Whether what makes a value is a kernel that Inductor generates, which may store it in another dtype."""
    return is_generated(made) or opname(made) in SCANS
