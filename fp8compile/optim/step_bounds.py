"""Which updates have a bound that holds for every gradient, and what it takes of their states.

The bounds themselves: fp8compile/numerics/step_bounds.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8compile._arguments import is_number
from fp8compile.numerics import step_bounds
from fp8compile.optim.plain_optimizers import PlainLion

States = Mapping[str, Tensor]
Number = float | Tensor
UNBOUNDED = "a step of {} is as large as its gradient"
OPTIONS = "no bound is known for these options: {} needs {}"


@dataclass(frozen=True)
class Bound:
    """The kind of bound that an update has.

    Attributes:
        kind: "Adam", "RMSprop" or "Lion".
        decoupled: of Adam: whether weight decay shrinks the weight itself.
        momentum: of RMSprop.
    """

    kind: str
    decoupled: bool = True
    momentum: bool = False

    def numbers(self, group: Mapping[str, Any]) -> dict[str, Number]:
        """What ``largest_step`` takes of a parameter group, computed in double."""
        lr, decay = group["lr"], group["weight_decay"]
        shrink = {"decay": 1 - lr * decay if self.decoupled else decay}
        if self.kind == "Adam":
            beta1, beta2 = group["betas"]
            return {"lr": lr, "beta1": beta1, "beta2": beta2, "1-beta1": 1 - beta1, "1-beta2": 1 - beta2, **shrink}
        if self.kind == "RMSprop":
            return {"lr": lr, "1-alpha": 1 - group["alpha"], "momentum": group["momentum"]}
        return {"lr": lr, **shrink}


ADAM = (torch.optim.Adam, torch.optim.AdamW)


def bound_of(optimizer: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> Bound | None:
    """The bound of an optimizer's step, by its class; None where none is known, whatever its numbers."""
    if optimizer in ADAM:
        return Bound("Adam", decoupled=bool(group["decoupled_weight_decay"]))
    if optimizer is torch.optim.RMSprop:
        return None if group["centered"] else Bound("RMSprop", momentum=bool(group["momentum"]))
    return Bound("Lion") if optimizer is PlainLion else None


def why_no_bound(optimizer: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> str | None:
    """Why the next step of this optimizer has no bound; None where it has one."""
    if optimizer in ADAM:
        values = (*group["betas"], group["eps"])
        known = all(map(is_number, values)) and step_bounds.adam_has_a_bound(*values)
        needs = "betas that are numbers up to 0.9999, beta1 ** 2 < beta2, eps from 1e-12 on"
        return None if known else OPTIONS.format("Adam", needs)
    if optimizer is torch.optim.RMSprop:
        rest = 1 - group["alpha"]
        known = (
            not group["centered"] and rest >= step_bounds.SMALLEST_REST and group["eps"] >= step_bounds.SMALLEST_EPS
        )
        return None if known else OPTIONS.format("RMSprop", "alpha up to 0.9999, eps from 1e-12 on, centered=False")
    return None if optimizer is PlainLion else UNBOUNDED.format(optimizer.__name__)


def reach(bound: Bound, states: States) -> Tensor:
    """What of each element's states the bound of the next step needs the largest of."""
    if bound.kind == "Adam":
        return step_bounds.adam_reach(states["exp_avg"], states["exp_avg_sq"])
    if bound.momentum:
        return states["momentum_buffer"].abs()
    return next(iter(states.values())).clamp(0.0, 0.0)  # zeros; made of nothing they were a kernel of their own


def largest_step(bound: Bound, reached: Tensor, n: Mapping[str, Tensor], step: Tensor) -> tuple[Tensor, Tensor]:
    """What the weights are multiplied by, and the largest step; ``reached``: the largest ``reach`` before it."""
    if bound.kind == "Adam":
        rests = n["1-beta1"], n["1-beta2"]
        most = step_bounds.adam_step(reached, n["lr"], n["beta1"], n["beta2"], rests, step)
        return (n["decay"] if bound.decoupled else n["decay"].new_ones(())), most
    if bound.kind == "RMSprop":
        momentum = n["momentum"] if bound.momentum else n["momentum"].new_zeros(())
        return n["lr"].new_ones(()), step_bounds.rmsprop_step(reached, n["lr"], n["1-alpha"], momentum)
    return n["decay"], n["lr"].abs()
