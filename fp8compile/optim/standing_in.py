"""What an optimizer's step is tried on: one of the same class with one parameter, and nothing of the user's to change."""

from __future__ import annotations

import contextlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

OF_EVERY_OPTIMIZER = ("state", "param_groups", "defaults")
CHANGES = "its step changes {!r}, which belongs to no parameter"


class NotCaptured(Exception):
    """A step that no graph stands for, with the reason."""


def standing_in(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    p: Tensor,
    state: dict[str, Any],
    attributes: Mapping[str, Any],
) -> torch.optim.Optimizer:
    """The optimizer as if this were its only parameter, with a state, a group and attributes of its own."""
    alone: torch.optim.Optimizer = object.__new__(plain_class(optimizer))
    alone.__dict__.update(attributes)
    alone.state = defaultdict(dict, {p: state})
    alone.param_groups = [dict(group) | {"params": [p]}]
    return alone


def own_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """For one that stands in, whose step then changes nothing of the optimizer's: other containers, other single numbers."""
    return {name: _copied(value) for name, value in _its_own(optimizer).items()} | {"defaults": optimizer.defaults}


def _its_own(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Attributes that its class has given it: neither those of every optimizer, nor those that are ours."""
    others = (*OF_EVERY_OPTIMIZER, *getattr(type(optimizer), "own_names", ()))
    return {name: value for name, value in vars(optimizer).items() if name not in others}


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach().clone()
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    return {key: _copied(each) for key, each in value.items()} if type(value) is dict else value


@contextlib.contextmanager
def unchanged(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Raises NotCaptured where the body changes what is plain in the optimizer or in its group: a graph would not."""
    [group] = optimizer.param_groups
    before = plain_attributes(optimizer), plain_values(group)
    yield
    after = plain_attributes(optimizer), plain_values(group)
    for was, now in zip(before, after, strict=True):
        for name in was.keys() | now.keys():
            if name not in was or name not in now or was[name] != now[name]:
                raise NotCaptured(CHANGES.format(name))


def plain_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Numbers, strings and containers of them that an optimizer has beside groups and states."""
    return plain_values(_its_own(optimizer))


def plain_values(several: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a mapping that can be compared; symbols by what they are. Tensors are left out."""
    return {name: found for name, value in several.items() if (found := _plain(value)) is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, (torch.SymFloat, torch.SymInt)):
        return "symbol", id(value)  # what it is called changes where Python asks for its value
    if isinstance(value, (bool, int, float, str)):
        return type(value).__name__, value
    if isinstance(value, (list, tuple)) and len(value) < 100:
        return tuple(map(_plain, value))
    if type(value) is dict and len(value) < 100:
        return tuple((id(key) if isinstance(key, Tensor) else key, _plain(each)) for key, each in value.items())
    return None


def plain_step(optimizer: torch.optim.Optimizer) -> Callable[[Any], Any]:
    """The ``step`` of the class, without torch's hooks and profiler, and without what a scheduler put around it."""
    step: Callable[[Any], Any] = inspect.unwrap(plain_class(optimizer).step)
    return step


def plain_class(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """Its class without what compress has made of it."""
    return getattr(type(optimizer), "plain", type(optimizer))
