"""Which operations Inductor puts into one kernel: a kernel that takes one row at a time stores no codes across rows.

Changes no numbers. A store across rows writes one byte to each row of the other order, and memory takes 32 bytes at a time:
so a byte costs as much as 32. Inductor counts bytes alone. Kernels that take a tile of rows store across them at full speed:
pointwise ones, and sums along rows that are too long to be held at once. A kernel that holds whole rows in registers, or
that sums along rows and across them, takes one row (torch 2.11 to 2.15). What stores codes across rows is left out of it,
and becomes a kernel of tiles.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fp8compile import _torch as private
from fp8compile.fx.inductor_choices import choosing
from fp8compile.numerics.formats import E4M3, E5M2

CODES = (E4M3.dtype, E5M2.dtype)
HELD_AT_ONCE = 1024  # elements of a row that Inductor's kernels hold in registers


def with_tiles_for_codes(inner_compile: Callable[..., Any]) -> Callable[..., Any]:
    """An inner compiler of Inductor that keeps codes that are stored across rows out of kernels that take one row at a time.

    It wraps the inner compiler since a backward is compiled when it first runs.
    """
    return fusing_only_where(_stores_in_tiles)(inner_compile)


@contextmanager
def fusing_only_where(allowed: Callable[[Any, Any, Any], bool]) -> Iterator[None]:
    """Inductor fuses two nodes only where ``allowed(scheduler, first, second)`` holds too."""

    def can_fuse(theirs: Any, scheduler: Any, first: Any, second: Any, score: int) -> bool:
        return theirs(scheduler, first, second, score) and allowed(scheduler, first, second)

    with choosing("can_fuse", can_fuse):
        yield


def _stores_in_tiles(scheduler: Any, first: Any, second: Any) -> bool:
    return not (_scatters(scheduler, first, second) or _scatters(scheduler, second, first))


def _scatters(scheduler: Any, stores: Any, rows: Any) -> bool:
    """Whether ``stores`` writes codes across the rows that the kernel of ``rows`` takes one at a time. Loops of a CPU are not
    such kernels."""
    device = rows.get_device()
    if device is None or device.type == "cpu":
        return False
    return any(map(_stores_across, stores.get_nodes())) and _takes_one_row(scheduler, rows, stores)


def _stores_across(node: Any) -> bool:
    """Whether an operation writes codes in another order than that in which it reads."""
    if node.is_reduction():
        return False
    memory = [dep for dep in node.read_writes.reads if isinstance(dep, private.MemoryDep)]
    return any(
        isinstance(write, private.MemoryDep)
        and private.inductor_virtualized.graph.get_dtype(write.name) in CODES
        and any(_other_order(write, read) for read in memory)
        for write in node.read_writes.writes
    )


def _other_order(write: Any, read: Any) -> bool:
    """Whether consecutive elements of one are not consecutive in the other, which has them all."""
    if tuple(write.var_names) != tuple(read.var_names):
        return False
    sizes = private.inductor_virtualized.graph.sizevars
    steps = zip(*(sizes.stride_vars(dep.index, dep.var_names) for dep in (write, read)), strict=True)
    return any((one == 1) != (other == 1) and one != 0 and other != 0 for one, other in steps)


def _takes_one_row(scheduler: Any, group: Any, stores: Any) -> bool:
    """Whether Inductor's kernel for ``group`` takes one row at a time: for its own sums, or for those of the values that it
    and ``stores`` both read, since it follows them."""
    if group.is_reduction():
        return _holds_rows(group) or any(
            private.MixOrderReduction.can_fuse(group, other)
            for other in scheduler.name_to_node.values()
            if other.is_reduction()
        )
    shared = group.used_buffer_names() & stores.used_buffer_names()
    return any(
        _takes_one_row(scheduler, node, stores)
        for node in _before(scheduler, group)
        if node.is_reduction() and node.used_buffer_names() & shared
    )


def _before(scheduler: Any, group: Any) -> Iterator[Any]:
    """What a kernel follows and may be one kernel with: not behind one number of a whole tensor, such as a scale."""
    waiting, seen = [group], set[str]()
    while waiting:
        names = {dep.name for dep in waiting.pop().unmet_dependencies} - seen
        seen |= names
        for made in (scheduler.name_to_buf[name] for name in names if name in scheduler.name_to_buf):
            if made.defining_op is not None and not _is_one_number(made.defining_op):
                waiting.append(made.defining_op)
                yield made.defining_op


def _is_one_number(node: Any) -> bool:
    """Whether a reduction has no rows, but one number for a result: such as a scale that was computed of others."""
    if not node.is_reduction():
        return False
    sizes = private.inductor_virtualized.graph.sizevars
    return bool(sizes.statically_known_equals(node.group[1][0], 1))


def _holds_rows(group: Any) -> bool:
    """Whether a kernel holds whole rows in registers: short ones that it sums along. What it sums down columns is no row."""
    sizes = private.inductor_virtualized.graph.sizevars
    lengths = (node.group[1][-1] for node in group.get_nodes() if node.is_reduction() and sums_along_rows(node))
    return any(sizes.statically_known_leq(length, HELD_AT_ONCE) for length in lengths)


def sums_along_rows(reduction: Any) -> bool:
    """Whether what is summed lies side by side in memory. Of the variables by which a reduction reads whole tensors, the last
    are its own."""
    sizes = private.inductor_virtualized.graph.sizevars
    numel = math.prod(itertools.chain(*reduction.get_ranges()))
    memory = [dep for dep in reduction.read_writes.reads if isinstance(dep, private.MemoryDep)]
    whole = [dep for dep in memory if sizes.statically_known_equals(math.prod(dep.size), numel)]
    return any(sizes.stride_vars(dep.index, dep.var_names)[-1] == 1 for dep in whole if dep.var_names)
