"""Weights that were changed between two steps of an optimizer that keeps masters: the masters follow them.

    master   <-   master   where the weight is what the master rounds to: its low bits are kept
                  weight   elsewhere, NaN among it

A weight is compared with its master only where its version counter or its address is not what the last step has left, so a
step costs nothing more. Operations under ``torch.no_grad()`` count its version: ``load_state_dict``, ``clamp_``, averaging.
What is written to ``p.data`` in place does not, and is lost at the next step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fp8compile._distributed import is_sharded, local_part
from fp8compile.numerics.states.scaled_weights import OCTAVES, inv_scale_for, scaled, unscaled, weight_of
from fp8compile.optim.exchange import seen
from fp8compile.optim.plan import INV_SCALE16, MASTER16, Tensors

MASTER = "master"
WITHIN = 16 - OCTAVES  # a master may grow by less than 2**WITHIN


class Edits:
    """What one optimizer knows of its weights since its last step."""

    def __init__(self) -> None:
        self._left: dict[Tensor, tuple[int, ...]] = {}

    @torch.no_grad()
    def take_over(self, parameters: Iterable[Tensor], states: Mapping[Tensor, Tensors]) -> None:
        """Before a step: masters follow the weights that have changed since the last one. Nothing waits for the device."""
        for p in parameters:
            state = states.get(p) or {}
            if _has_master(state) and self._left.get(p) != _as_it_is(p):
                follow(p, state)

    def leave(self, parameters: Iterable[Tensor], states: Mapping[Tensor, Tensors]) -> None:
        """Behind a step: these are the weights as it has left them."""
        self._left.update((p, _as_it_is(p)) for p in parameters if _has_master(states.get(p) or {}))


def _has_master(state: Mapping[str, Tensor]) -> bool:
    return MASTER in state or MASTER16 in state


def _as_it_is(p: Tensor) -> tuple[int, ...]:
    """What changes with each change of a weight that is counted: as a DTensor, or as this rank's part of it."""
    return (p._version, *seen(local_part(p) if is_sharded(p) else p))


def follow(p: Tensor, state: Tensors) -> None:
    """Have the master in a state, in place, be what the 16-bit weight ``p`` is, but for the bits that ``p`` lacks."""
    here = local_part(p)
    if MASTER in state:
        master = local_part(state[MASTER])
        torch.where(master.to(here.dtype) == here, master, here, out=master)
        return
    master, inv_scale = local_part(state[MASTER16]), state[INV_SCALE16]
    kept = weight_of(master, inv_scale, here.dtype) == here
    exact = torch.where(kept, unscaled(master, inv_scale), here)
    if not is_sharded(p):  # ranks would have to agree on another scale
        inv_scale.copy_(_wide_enough(inv_scale, torch.where(kept, 0, here.float())))
    master.copy_(scaled(exact, inv_scale))


def _wide_enough(inv_scale: Tensor, edited: Tensor) -> Tensor:
    """The scale as it is, or the one of ``edited``, FP32, where these are past it and finite."""
    largest = edited.abs().amax() if edited.numel() else edited.sum()
    fitting = inv_scale_for(largest)
    return torch.where((fitting > inv_scale * 2**WITHIN) & largest.isfinite(), fitting, inv_scale)
