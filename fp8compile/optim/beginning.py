"""The state of a parameter before a step: begun where it has none, completed where an option has changed since."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fp8compile._distributed import lies_by_channels, local_part, shard_like
from fp8compile.optim.checkpoint import CheckpointState
from fp8compile.optim.low_bits import DTYPES, initial_state, kept_beside, sharded
from fp8compile.optim.plan import UpdatePlan

State = Mapping[str, Tensor]
BEGINS_LATE = (
    "{} has taken {} steps, and an option now asks for a state that begins by a first step of its own, such as a momentum "
    "with dampening: set it before the first step, or make a new optimizer"
)


def completed(
    p: Tensor, plan: UpdatePlan, state: State, name: str, *, undamped: bool = False
) -> dict[str, Tensor] | None:
    """The state that ``plan`` takes, with all that there is; None where nothing is missing.

    A state that is stored in another way than the plan's is encoded again: where it has to be exact from now on, or where the
    parameter lies in another order of memory now.

    Args:
        name: of the parameter, for errors.
        undamped: whether a state that begins by a first step of its own (SGD's momentum) may begin later: as zeros it does.

    Raises:
        ValueError: a state would have to begin by a first step of its own, and some steps were taken.
    """
    needed = {"step", *plan.update.singles, *kept_beside(plan.master)}
    needed |= {key for each, _ in plan.codecs for key in plan.part_keys(each)}
    beside = {name: state[name] for name in DTYPES if name in state}
    moved = any(lies_by_channels(part) != plan.channels_last for part in beside.values())
    if needed <= state.keys() and not moved:
        return None
    begins = {each for each, _ in plan.codecs} - {key.partition(".")[0] for key in state}
    if plan.update.first is not None and state and begins and not undamped and float(state["step"]) > 0:
        raise ValueError(BEGINS_LATE.format(name, int(state["step"])))
    step = torch.zeros((), dtype=torch.float32, device=local_part(p).device)
    found = {"step": step, **initial_state(plan, p), **state, **sharded(p, plan, beside)}
    for each, codec in plan.codecs:
        other = [key for key in state if key.partition(".")[0] == each and key not in plan.part_keys(each)]
        if other:
            parts = CheckpointState(p, dict(state), name).encoded(each, codec, signed=plan.update.states[each])
            found = {key: t for key, t in found.items() if key not in other}
            found |= zip(plan.part_keys(each), (shard_like(p, part) for part in parts), strict=True)
    return found


def name_of(names: Mapping[int, str], p: Any) -> str:
    """For errors."""
    return names.get(id(p), f"a parameter of shape {[*p.shape]}")
