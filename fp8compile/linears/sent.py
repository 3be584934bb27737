"""An answer on its way from a device to the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class PendingBool:
    """A bool on its way from a device to the host; asking for it waits until it is there.

    ``arrived`` says that it is there.
    """

    def __init__(self, value: Tensor) -> None:
        self.there: Any = None
        if value.is_cuda:
            self.value = torch.empty((), dtype=torch.bool, pin_memory=True)
            self.value.copy_(value, non_blocking=True)
            self.there = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.there.record(torch.cuda.current_stream(value.device))
        else:
            self.value = value

    @property
    def arrived(self) -> bool:
        return self.there is None or bool(self.there.query())

    def __bool__(self) -> bool:
        if self.there is not None:
            self.there.synchronize()
        return bool(self.value)
