"""What can be measured: every benchmark is a declared value.

    Benchmark   a name, the part of a GPU run it belongs to, its cases, what it is compared with, and a function
    Case        one shape: one row of a results file, measured by one call of that function
    Row         {"arms": {arm: {lap: {"seconds", "spread", "bytes", "flops", ...}, ...}}, "left_out": {arm: reason}}

A lap is a part of a step that is timed by itself: forward, backward, encode, ... ``bytes`` are the least that the lap must
move through memory and ``flops`` the least it must compute, counted from shapes and never measured; what is measured are
seconds, bytes kept and peaks of memory. An arm that cannot run here is left out, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

PARTS = ("kernels", "layers", "e2e")
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One shape: ``shape`` goes into the results as it is."""

    name: str
    shape: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Setting:
    """Where a row is measured.

    Attributes:
        device: CPU or CUDA.
        tiny: toy sizes: the machinery is tried, no figure means anything.
        rounds: how often each arm is timed.
    """

    device: torch.device
    tiny: bool
    rounds: int

    @classmethod
    def on(cls, device: str, tiny: bool) -> Setting:
        """The setting of a device. Five rounds where nothing is to be learnt from the figures."""
        return cls(torch.device(device), tiny, 5 if tiny else 25)


@dataclass(frozen=True)
class Benchmark:
    """Something that is measured, at several shapes, beside peers.

    Attributes:
        name: for the command line and the results.
        part: one of ``PARTS``.
        about: what is measured, in a line.
        compared_with: the arms beside ours.
        cases: the shapes on a GPU.
        tiny: shapes that a CPU runs in seconds, through the same code.
        measure: of a case in a setting.
        limit: seconds that a row may take, compilation included.
    """

    name: str
    part: str
    about: str
    compared_with: tuple[str, ...]
    cases: tuple[Case, ...]
    tiny: tuple[Case, ...]
    measure: Callable[[Case, Setting], Row]
    limit: int = 120

    def cases_for(self, tiny: bool) -> tuple[Case, ...]:
        """The cases of a setting."""
        return self.tiny if tiny else self.cases

    def case(self, name: str) -> Case:
        """The case of that name, whether tiny or not."""
        return next(case for case in (*self.cases, *self.tiny) if case.name == name)
