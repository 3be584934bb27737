"""CUDA bytes of one arm while others hold theirs: what its largest step would take if the arm were alone.

held    bytes allocated while the arm acts, less bytes freed: its parameters, optimizer states, compiled code's constants
peak    largest allocation during a step, less what was allocated before it, plus what the arm itself held
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class ArmMemory:
    """The memory of one arm; on a CPU nothing is counted.

    Attributes:
        held: bytes that the arm holds between its turns.
        peak: bytes of its largest step; None before one was counted.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.held = 0
        self.peak: int | None = None

    @contextmanager
    def counted(self, a_step: bool = False) -> Iterator[None]:
        """Allocations within this context belong to the arm; with ``a_step`` their maximum counts for ``peak``."""
        if self.device.type != "cuda":
            yield
            return
        before = torch.cuda.memory_allocated(self.device)
        if a_step:
            torch.cuda.reset_peak_memory_stats(self.device)
        yield
        if a_step:
            alone = torch.cuda.max_memory_allocated(self.device) - before + self.held
            self.peak = max(self.peak or 0, alone)
        self.held += torch.cuda.memory_allocated(self.device) - before
