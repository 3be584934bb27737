"""What a history learned since all ranks agreed last, so that they go on with equal scales whatever each of them ran.

A rank whose operand was all zeros adds nothing to its history, one that did not run adds no pass, one with micro-batches adds
several. So histories of ranks do not stand beside one another. What they agreed on last does. Ranks exchange that, and what
each learned since: an entry, and who fell back. Of each number the largest counts. That becomes one entry of all.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Since:
    """What one history learned since this point.

    Args:
        amaxes: the history then, float32 ``[V, length]``.
        patience: int64 ``[2]``, then.
        due: bool, whether a step had to measure then.
    """

    def __init__(self, amaxes: Tensor, patience: Tensor, due: Tensor) -> None:
        self._then, self._patience = amaxes, patience
        self._due, self._measured = due, torch.zeros_like(due)
        self._entry = torch.zeros_like(amaxes[:, 0])
        self._fell_back = torch.zeros_like(self._entry, dtype=torch.bool)

    def measured(self) -> None:
        """Note that a step has measured."""
        self._measured = torch.ones_like(self._measured)

    def add(self, entry: Tensor, fell_back: Tensor) -> None:
        """Note the entries of one backward, and who fell back, which forgets what came before."""
        self._entry = torch.where(fell_back & (entry > 0), entry, torch.maximum(self._entry, entry))
        self._fell_back = self._fell_back | fell_back

    def packed(self, amaxes: Tensor) -> Tensor:
        """All of it in one row of numbers, float32. What the history ``amaxes`` has forgotten since is left out."""
        entry = torch.minimum(self._entry, amaxes.amax(1))
        numbers = [
            self._then.reshape(-1),
            entry,
            self._fell_back,
            self._patience,
            self._due.view(1),
            self._measured.view(1),
        ]
        return torch.cat([each.float() for each in numbers])

    def unpacked(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The largest of what ranks packed, as history, patience and ``due`` before the entry; the entry; who fell back."""
        size, rows = self._then.numel(), len(self._entry)
        then, entry, fell_back, patience, due, measured = torch.split(packed, [size, rows, rows, 2, 1, 1])
        waits = (due > 0) & (measured == 0)
        return then.view_as(self._then), patience.to(self._patience.dtype), waits.view(()), entry, fell_back > 0
