"""The captured updates of one optimizer: by shape and group, captured again where an option says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from fp8compile.optim.capture import numbers_in
from fp8compile.optim.captured_update import CapturedUpdate, captured_update
from fp8compile.optim.shared_updates import shared_update
from fp8compile.optim.standing_in import NotCaptured, plain_attributes, plain_class

Group = Mapping[str, Any]
Shape = tuple[int, ...]
CANNOT = "the step of {}.{} cannot be captured: {}. Use it as it is, or one of fp8compile.optim"


@runtime_checkable
class ChecksOptions(Protocol):
    """An optimizer of ours, which says what is wrong with a group that was changed."""

    def check_options(self, group: Group) -> None: ...


class CapturedUpdates:
    """Of one optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._known: dict[int, tuple[Group, Any, int, dict[Any, CapturedUpdate]]] = {}
        self._current: dict[Tensor, tuple[int, Shape, CapturedUpdate]] = {}
        self._versions = 0

    def check(self) -> None:
        """Look at all groups: ``current`` is right until one changes."""
        for group in self._optimizer.param_groups:
            self.version(group)

    def current(self, p: Tensor, group: Group) -> CapturedUpdate:
        """That of a parameter, as ``check`` has found the groups."""
        known = self._current.get(p)
        version = self._known[id(group)][2]
        if known is None or known[0] != version or known[1] != p.shape:
            shape = tuple(p.shape)
            known = self._current[p] = version, shape, self.of(shape, group)
        return known[2]

    def of(self, shape: Shape, group: Group) -> CapturedUpdate:
        """The update of a parameter of ``shape``. Raises ValueError for a step that is not captured."""
        self.version(group)
        known = self._known[id(group)][3]
        key = shape if is_foreign(self._optimizer) else ("dimensions", len(shape))
        found = known.get(key) or known.get(shape)
        if found is None:
            found = self._capture(group, shape)
            known[shape if found.whole_tensor else key] = found
        return found

    def version(self, group: Group) -> int:
        """A number that changes where updates of the group do. Raises ValueError for an option that is wrong."""
        values = _values(group), plain_attributes(self._optimizer) if is_foreign(self._optimizer) else None
        mine = self._known.get(id(group))
        if mine is not None and mine[0] is group and mine[1] == values:
            return mine[2]
        if isinstance(self._optimizer, ChecksOptions):
            self._optimizer.check_options(group)
        if mine is None or mine[0] is not group or mine[1][1] != values[1] or not _hold(mine, group):
            self._versions += 1
            here = {*map(id, self._optimizer.param_groups)}
            self._known = {each: known for each, known in self._known.items() if each in here}
            self._current.clear()
            self._known[id(group)] = group, values, self._versions, {}
        else:
            self._known[id(group)] = group, values, *mine[2:]
        return self._known[id(group)][2]

    def _capture(self, group: Group, shape: Shape) -> CapturedUpdate:
        try:
            if is_foreign(self._optimizer):
                return captured_update(self._optimizer, group, shape)
            return shared_update(self._optimizer, group, shape)
        except NotCaptured as reason:
            kind = plain_class(self._optimizer)
            raise ValueError(CANNOT.format(kind.__module__, kind.__name__, reason)) from reason


def is_foreign(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step may look at shapes and attributes: element-wise steps of torch.optim and ours do not."""
    return not plain_class(optimizer).__module__.startswith(("torch.optim", f"{__package__}."))


def _values(group: Group) -> tuple[Any, ...]:
    """What is in a group, so that a change is seen. A tensor's value is not read."""
    return tuple((name, _plain(value)) for name, value in group.items() if name not in ("params", "param_names"))


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return "tensor", id(value)
    return tuple(map(_plain, value)) if isinstance(value, (list, tuple)) else value


def _hold(known: tuple[Group, Any, int, dict[Shape, CapturedUpdate]], group: Group) -> bool:
    """Whether a group's updates are the same still, although a value has changed."""
    numbers = {path[0] for path in numbers_in(group)}
    now, before = dict(_values(group)), dict(known[1][0])
    same = all(now.get(name) == before.get(name) for name in now.keys() | before.keys() if name not in numbers)
    return same and all(update.holds(group) for update in known[3].values())
