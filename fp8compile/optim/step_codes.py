"""Codes of the new weight, made in the kernel that makes the weight, under a scale that is known before it.

    inv_scale = 2^ceil(log2(largest / 448))      largest: no weight exceeds it after this step (numerics/step_bounds.py)
    codes     = E4M3 of the weight as it is stored, in the dtype that graphs encode it from
    amax, reach                                  of each group of 128: what the next step's ``largest`` is made of

Reads no bytes more than the update, and writes one an element, and 8 a group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8compile.numerics.delayed import quantize_under
from fp8compile.numerics.formats import E4M3
from fp8compile.numerics.states.interface import in_groups, metadata_shape
from fp8compile.numerics.step_bounds import largest_after, power_of_two_for
from fp8compile.optim.step_bounds import Bound, States, largest_step, reach

GROUP = 128
ROWS, INV_SCALE, KNOWN = "weight.codes", "weight.inv_scale", "weight.known"
AMAX, REACH = "weight.amax", "weight.reach"  # by group


@dataclass(frozen=True)
class Wanted:
    """What graphs take of a weight: the dtype that it is encoded from; its codes by rows, and transposed."""

    dtype: torch.dtype
    by_rows: bool
    transposed: bool


def inv_scale_before(
    wanted: Wanted, bound: Bound, known: Tensor, n: Mapping[str, Tensor], step: Tensor, stored: torch.dtype
) -> Tensor:
    """The inv_scale, 0-d, of the codes that step ``step`` writes; ``known`` [2]: the weight's amax and reach before it."""
    amax, reached = known.unbind()
    decay, most = largest_step(bound, reached, n, step)
    return power_of_two_for(largest_after(amax, decay, most, (stored, wanted.dtype)), E4M3)


def written(weight: Tensor, inv_scale: Tensor) -> dict[str, Tensor]:
    """The codes of ``weight``, FP32 on the grid of the dtype that graphs encode from."""
    return {ROWS: quantize_under(weight, inv_scale, E4M3), INV_SCALE: inv_scale.reshape(1, 1)}


def measured(bound: Bound, weight: Tensor, precise: Tensor, states: States) -> dict[str, Tensor]:
    """By group, the weight's largest magnitude, as it is encoded and as the next step reads it, and the largest reach."""
    size = torch.maximum(weight.abs(), precise.abs())
    found = {AMAX: size, REACH: reach(bound, states)}
    shape = metadata_shape(weight.shape, GROUP)
    return {name: in_groups(each, GROUP).amax(-1).reshape(shape) for name, each in found.items()}
