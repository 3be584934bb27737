"""What can be measured: every benchmark is a declared value.

    Benchmark   a name, the part of a GPU run it belongs to, its cases, what it is compared with, and a function
    Case        one shape: one row of a results file, measured by one call of that function
    Arms        what a row of kernels times, made for a case; the same is lowered without a GPU (tests/sm90/run_kernels.py)
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
    """One shape: ``shape`` goes into the results as it is; one that is ``typical`` stands for its kernel in short tables."""

    name: str
    shape: Mapping[str, Any] = field(default_factory=dict)
    typical: bool = False


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
class Arms:
    """What is timed side by side.

    Attributes:
        calls: by arm, what runs its laps and ends each by ``lap(name)``.
        left_out: arms that cannot run here, with the reason.
        work: the least of a lap, or of "arm/lap" where an arm has less or more to do: ``kernel_rows.counted``.
        notes: what goes into the row as it is.
    """

    calls: Mapping[str, Callable[[Callable[[str], None]], object]]
    left_out: Mapping[str, str] = field(default_factory=dict)
    work: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)

    def least(self, arm: str, lap: str) -> Mapping[str, Any]:
        """The least that a lap must do; nothing where none is declared."""
        return self.work.get(f"{arm}/{lap}", self.work.get(lap, {}))


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
        arms: of kernels, what ``measure`` times.
    """

    name: str
    part: str
    about: str
    compared_with: tuple[str, ...]
    cases: tuple[Case, ...]
    tiny: tuple[Case, ...]
    measure: Callable[[Case, Setting], Row]
    limit: int = 120
    arms: Callable[[Case, Setting], Arms] | None = None

    def cases_for(self, tiny: bool) -> tuple[Case, ...]:
        """The cases of a setting."""
        return self.tiny if tiny else self.cases

    def case(self, name: str) -> Case:
        """The case of that name, whether tiny or not."""
        return next(case for case in (*self.cases, *self.tiny) if case.name == name)
