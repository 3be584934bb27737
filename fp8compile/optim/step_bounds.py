"""Which updates have a bound that holds for every gradient, and what it takes of their states.

The bounds themselves: fp8compile/numerics/step_bounds.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fp8compile._arguments import is_number
from fp8compile.numerics import step_bounds
from fp8compile.optim.updates import AdamUpdate, LionUpdate, RMSPropUpdate, States, Update

UNBOUNDED = "a step of {} is as large as its gradient"
OPTIONS = "no bound is known for these options: {} needs {}"


def why_no_bound(update: Update, group: Mapping[str, Any]) -> str | None:
    """Why the next step of this update has no bound; None where it has one."""
    if isinstance(update, AdamUpdate):
        values = (*group["betas"], group["eps"])
        known = all(map(is_number, values)) and step_bounds.adam_has_a_bound(*values)
        needs = "betas that are numbers up to 0.9999, beta1 ** 2 < beta2, eps from 1e-12 on"
        return None if known else OPTIONS.format("Adam", needs)
    if isinstance(update, RMSPropUpdate):
        rest = 1 - group["alpha"]
        known = not update.centered and rest >= step_bounds.SMALLEST_REST and group["eps"] >= step_bounds.SMALLEST_EPS
        return None if known else OPTIONS.format("RMSprop", "alpha up to 0.9999, eps from 1e-12 on, centered=False")
    return None if isinstance(update, LionUpdate) else UNBOUNDED.format(type(update).__name__.removesuffix("Update"))


def reach(update: Update, states: States) -> Tensor:
    """What of each element's states the bound of the next step needs the largest of."""
    if isinstance(update, AdamUpdate):
        return step_bounds.adam_reach(states["exp_avg"], states["exp_avg_sq"])
    if isinstance(update, RMSPropUpdate) and update.momentum:
        return states["momentum_buffer"].abs()
    return next(iter(states.values())).clamp(0.0, 0.0)  # zeros; made of nothing they were a kernel of their own


def largest_step(update: Update, reached: Tensor, n: Mapping[str, Tensor], step: Tensor) -> tuple[Tensor, Tensor]:
    """What the weights are multiplied by, and the largest step; ``reached``: the largest ``reach`` before it."""
    if isinstance(update, AdamUpdate):
        rests = n["1-beta1"], n["1-beta2"]
        most = step_bounds.adam_step(reached, n["lr"], n["beta1"], n["beta2"], rests, step)
        return (n["decay"] if update.decoupled else n["decay"].new_ones(())), most
    if isinstance(update, RMSPropUpdate):
        momentum = n["momentum"] if update.momentum else n["momentum"].new_zeros(())
        return n["lr"].new_ones(()), step_bounds.rmsprop_step(reached, n["lr"], n["1-alpha"], momentum)
    return n["decay"], n["lr"].abs()
