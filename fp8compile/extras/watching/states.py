"""SQNR of optimizer states, sampled: one parameter at a time, in turn, and rarely, since a sample runs its update anew.

    sample   |state| and |state - stored state| of what the step is about to store  ->  20 log10 of the ratio, in dB

The update runs uncompiled here. Where a compiled one rounds another last bit, a dithered state may take the other of two
codes: the SQNR is the same but for that noise.

At most one step in ``every`` takes a sample. Where one takes long beside a step they are rarer: at most ``SHARE`` of the time
on the host is spent on them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fp8compile._distributed import local_part
from fp8compile.extras.watching.late import Late
from fp8compile.numerics.metrics import decibels
from fp8compile.optim.base import EncodedOptimizer

LARGEST = 2**24  # elements: an update outside of its kernel makes some ten FP32 temporaries of each
SHARE = 1 / 500


@dataclass(frozen=True)
class Sample:
    """One parameter's norms on their way to the host: float64 ``[states, 2]``, of the state and of its error."""

    parameter: str
    states: tuple[str, ...]
    norms: Late

    def read(self) -> dict[str, Any]:
        """``sqnr``: by state in dB, and whose; a state that is stored exactly has inf."""
        several = zip(self.states, self.norms.value().tolist(), strict=True)
        return {"sqnr": {state: decibels(a * a, b * b) for state, (a, b) in several}, "sqnr_of": self.parameter}


class Sampler:
    """Chooses when and whom to sample.

    Args:
        every: steps between two samples, at least.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._next, self._turn = min(10, every), 0
        self._began: tuple[int, float] | None = None

    @torch.no_grad()
    def sample(self, step: int, optimizer: torch.optim.Optimizer) -> Sample | None:
        """A sample, where one is due in this step, from gradients that are about to be used. No host sync."""
        now = time.perf_counter()
        self._began = self._began or (step, now)
        if step < self._next or not isinstance(optimizer, EncodedOptimizer):
            return None
        taken = self._take(optimizer)
        cost, (first, began) = time.perf_counter() - now, self._began
        step_seconds = (now - began) / max(1, step - first)
        self._next = step + max(self.every, round(cost / SHARE / max(step_seconds, 1e-6)))
        return taken

    def _take(self, optimizer: EncodedOptimizer) -> Sample | None:
        fit = [(index, p) for index, _, p in optimizer._parameters() if _can_be_sampled(optimizer, p)]
        if not fit:
            return None
        index, p = fit[self._turn % len(fit)]
        self._turn += 1
        plan, tensors = optimizer.step_function(p)
        exact = plan.fresh_states(tensors)
        stored = plan.decoded(plan(tensors), tensors["param"].shape)
        norms = torch.stack([torch.stack([_norm(x), _norm(x.double() - stored[name])]) for name, x in exact.items()])
        return Sample(optimizer.names.names.get(id(p), f"parameter {index}"), tuple(exact), Late(norms))


def _can_be_sampled(optimizer: EncodedOptimizer, p: Tensor) -> bool:
    """Whether it has a gradient and encoded states, is not large, and no other rank is needed."""
    if p.grad is None or not optimizer.state.get(p) or not 0 < local_part(p).numel() <= LARGEST:
        return False
    if isinstance(p, DTensor) and p.grad.placements != p.placements:  # type: ignore[attr-defined]
        return False
    group = next(group for group in optimizer.param_groups if any(each is p for each in group["params"]))
    return any(codec.name != "fp32" for _, codec in optimizer.plan_of(p, group).codecs)


def _norm(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.float64)
    return norm
