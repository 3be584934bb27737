"""The numbers of parameter groups, such as learning rates, as one FP32 tensor for each group and device.

Compiled code reads them, so that a change of one compiles nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8compile.optim.updates import Number

Group = Mapping[str, Any]


class Numbers(NamedTuple):
    """Those of one group on one device.

    Attributes:
        group: held, since ids are used again.
        floats: what was copied last; None in the place of a tensor, and altogether if nothing was.
        tensor: FP32 [n].
    """

    group: Group
    floats: tuple[float | None, ...] | None
    tensor: Tensor


class GroupNumbers:
    """Of all groups of one optimizer."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, torch.device], Numbers] = {}

    def of(self, group: Group, values: Sequence[Number], device: torch.device) -> Tensor:
        """Always the same tensor for a group and a device; a new one holds ``values``."""
        key = id(group), device
        if key not in self._known:
            tensor = torch.empty(len(values), dtype=torch.float32, device=device)
            self._known[key] = Numbers(group, None, tensor)
            self.refresh(group, values)
        return self._known[key].tensor

    def refresh(self, group: Group, values: Sequence[Number]) -> None:
        """Copy a group's numbers to its devices: floats if one has changed, tensors always, since they are not read here."""
        floats = tuple(None if isinstance(value, Tensor) else value for value in values)
        for (owner, device), (_, known, tensor) in self._known.items():
            if owner == id(group):
                if known != floats:
                    plain = [0.0 if value is None else value for value in floats]
                    tensor.copy_(torch.tensor(plain, dtype=torch.float32), non_blocking=True)
                    self._known[owner, device] = Numbers(group, floats, tensor)
                for i, value in enumerate(values):
                    if isinstance(value, Tensor):
                        tensor[i].copy_(value.reshape(()))

    def keep(self, groups: Sequence[Group]) -> None:
        """Forget those of all other groups."""
        ids = {*map(id, groups)}
        if any(owner not in ids for owner, _ in self._known):
            self._known = {key: each for key, each in self._known.items() if key[0] in ids}
