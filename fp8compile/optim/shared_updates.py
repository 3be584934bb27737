"""Captured updates shared by the groups and objects of one class of optimizers: a capture takes a tenth of a second.

Only of classes whose steps look at a parameter's number of dimensions, its group and its states, as those of torch.optim do.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from fp8compile.optim.capture import fp32_by_default
from fp8compile.optim.captured_update import CapturedUpdate, captured_update
from fp8compile.optim.initial_states import Initial, initial_states
from fp8compile.optim.standing_in import plain_class

MOST = 256  # updates that are kept; a program has a few dozen
_known: dict[Hashable, list[CapturedUpdate]] = {}


def shared_update(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], shape: tuple[int, ...]
) -> CapturedUpdate:
    """``captured_update``, or what it returned before where that is the update of this group too.

    Raises:
        NotCaptured: the reason.
    """
    with fp32_by_default():
        states = initial_states(optimizer, group, shape or (1,))
    whole, dimensions = (_key(optimizer, group, states, each) for each in (shape, len(shape)))
    for key in (dimensions, whole):
        for each in _known.get(key, ()):
            if each.holds(group):
                return each
    found = captured_update(optimizer, group, shape, states)
    if sum(map(len, _known.values())) >= MOST:
        _known.clear()
    _known.setdefault(whole if found.whole_tensor else dimensions, []).append(found)
    return found


def _key(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], states: Mapping[str, Initial], place: Hashable
) -> Hashable:
    """All that a captured update depends on, but for the group's numbers, which ``holds`` looks at."""
    kind = plain_class(optimizer)
    options = tuple((name, _option(value)) for name, value in group.items() if name not in ("params", "param_names"))
    begun = tuple((name, each.like.dim(), each.value, each.in_python) for name, each in states.items())
    return kind, kind.step, options, begun, place


def _option(value: Any) -> Hashable:
    """An option; 1 is not True. Numbers are left out. What cannot be compared is like nothing else."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_option, value))
    if isinstance(value, Tensor):
        return Tensor if value.numel() == 1 else object()
    if type(value) is float:
        return None
    return type(value), value if isinstance(value, Hashable) else object()
