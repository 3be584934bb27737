"""A small tensor on its way to the host: copied when it is given, read a step or more later, without a wait on the way.

On a GPU the copy goes to pinned memory behind the work that is queued, and an event says when it has arrived. On a CPU it is
made at once. Other devices copy at once too, which waits for them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Late:
    """A copy of ``value`` as it is now, in the order of the device's work."""

    def __init__(self, value: Tensor) -> None:
        self._there: Any = None
        value = value.detach()
        if value.is_cuda:
            self._copy = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            self._copy.copy_(value, non_blocking=True)
            self._there = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._there.record(torch.cuda.current_stream(value.device))
        else:
            self._copy = value.clone() if value.device.type == "cpu" else value.cpu()

    @property
    def arrived(self) -> bool:
        """Whether ``value()`` will not wait."""
        return self._there is None or bool(self._there.query())

    def value(self) -> Tensor:
        """The copy, on the host; waits until it is there."""
        if self._there is not None:
            self._there.synchronize()
        return self._copy
