"""What Inductor holds in registers: the groups of codes, along a row of which one amax is taken. Changes no numbers.

A kernel that walks along its rows in blocks reads them anew for each pass: for the amax of a group, and for its codes.
Where Inductor sees nothing but whole rows read side by side it holds up to 1,024 elements, else 64 (torch 2.11 to 2.15). A
scale beside them, or a norm's mean, is enough for it to walk along groups of 128. Lowered for an H100 the codes of a norm's
input took 45 instructions an element so, and take 23 from registers.

What is summed down columns is walked through: a bias gradient's sums over 64 rows of a ViT, with an amax beside them, take 31
instructions an element where Inductor holds them, since each lane has one element of a column and lanes exchange theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fp8compile import _torch as private
from fp8compile.compiler.row_kernels import sums_along_rows
from fp8compile.fx.inductor_choices import choosing
from fp8compile.linears.first_amax import GROUP

COLUMN = 32  # rows; shorter columns are Inductor's choice


def with_groups_held(inner_compile: Callable[..., Any]) -> Callable[..., Any]:
    """An inner compiler of Inductor that holds groups in registers."""
    return choosing("should_use_persistent_reduction", _held)(inner_compile)


def _held(theirs: Callable[..., bool], features: Any, cooperative_reduction: bool) -> bool:
    if theirs(features, cooperative_reduction):
        return not sums_down_columns(features)
    return holds_a_group(features) and not cooperative_reduction


def sums_down_columns(features: Any) -> bool:
    """Whether a kernel sums down columns alone, ``COLUMN`` elements of each or more."""
    is_long = private.inductor_virtualized.graph.sizevars.statically_known_geq(features.reduction_numel, COLUMN)
    return bool(is_long) and not any(map(sums_along_rows, features.reduction_nodes()))


def holds_a_group(features: Any) -> bool:
    """Whether what a kernel reduces are groups of codes, side by side in memory."""
    sizes = private.inductor_virtualized.graph.sizevars
    is_group = sizes.statically_known_equals(features.reduction_numel, GROUP)
    return bool(is_group) and all(map(sums_along_rows, features.reduction_nodes()))
