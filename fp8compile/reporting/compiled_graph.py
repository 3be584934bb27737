"""The report of one compiled graph: what the passes did to it, and the bytes it keeps and needs beside plain Inductor's."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fp8compile.explorer.content import PageGraph
from fp8compile.explorer.picture import Picture
from fp8compile.fx.snapshot import PassStep
from fp8compile.reporting.entries import Notes
from fp8compile.reporting.kernel import Kernel
from fp8compile.reporting.running import GeneratedPeaks, Peaks
from fp8compile.reporting.waterfall import Waterfall


@dataclass(frozen=True)
class GraphReport:
    """The report of one compiled graph.

    Attributes:
        kind: "training", or "inference" (nothing is saved, so nothing was rewritten).
        notes: what the passes did.
        saved_bytes: bytes saved for backward, distinct storages; parameters, buffers and tensors that the
            caller owns (data, masks, tables) left out.
        saved_bytes_plain: the same for plain Inductor.
        remarks: what concerns the graph as a whole.
        steps: each pass with the graph before and after it; collected by ``fp8compile.explain`` only, not in the JSON.
        workspace_bytes, workspace_bytes_plain: an estimate of the most that its forward or backward needs beyond what is
            kept, the parameters and their gradients (see fp8compile/analysis/liveness.py), ours and plain Inductor's.
        runs: how often it ran in the last step: its calls that held saved tensors at one time. 1 before its first step.
        peaks, peaks_plain: the most that forward and backward have alive, an estimate from the graph.
        waterfall: the bytes from plain Inductor's to ours, by rewrite, and what ours hold.
        picture: what is kept for the backward and what is in memory when; with ``steps``, and not in the JSON.
        kernels: what Inductor generated for it; with ``explain(..., kernels=True)``, and not in the JSON.
        generated: the most that the code that was generated for it has alive; not in the JSON.
        places: for a graph that serves several modules, or begins inside the model: the path of each such module, and how
            often it ran there. Paths in ``notes`` begin there.
    """

    kind: str
    notes: Notes = Notes()
    saved_bytes: int = 0
    saved_bytes_plain: int = 0
    remarks: tuple[str, ...] = ()
    workspace_bytes: int = 0
    workspace_bytes_plain: int = 0
    peaks: Peaks = Peaks()
    peaks_plain: Peaks = Peaks()
    runs: int = 1
    waterfall: Waterfall = Waterfall()
    places: tuple[tuple[str, int], ...] = ()
    steps: tuple[PassStep, ...] = field(default=(), compare=False, repr=False)
    picture: Picture | None = field(default=None, compare=False, repr=False)
    kernels: tuple[Kernel, ...] = field(default=(), compare=False, repr=False)
    generated: GeneratedPeaks | None = field(default=None, compare=False, repr=False)

    def to_dict(self) -> dict[str, Any]:
        left_out: dict[str, Any] = {"steps": (), "picture": None, "kernels": (), "generated": None}
        data = dataclasses.asdict(dataclasses.replace(self, **left_out))
        return {name: value for name, value in data.items() if name not in left_out}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> GraphReport:
        return cls(
            data["kind"],
            Notes.from_dict(data["notes"]),
            data["saved_bytes"],
            data["saved_bytes_plain"],
            tuple(data["remarks"]),
            data["workspace_bytes"],
            data["workspace_bytes_plain"],
            Peaks(**data["peaks"]),
            Peaks(**data["peaks_plain"]),
            data["runs"],
            Waterfall.from_dict(data["waterfall"]),
            tuple((path, times) for path, times in data["places"]),
        )

    @cached_property
    def placed(self) -> tuple[tuple[Notes, int], ...]:
        """The notes with paths from the top of the model, for each place, and how often the graph ran there."""
        return tuple((self.notes.moved(path), times) for path, times in self.places or (("", self.runs),))

    @property
    def known_peaks(self) -> Peaks:
        """Off the generated code, where there is any; else the estimate."""
        return self.generated.instead_of(self.peaks, self.saved_bytes) if self.generated else self.peaks

    @property
    def is_generated(self) -> bool:
        return self.known_peaks is not self.peaks

    @property
    def drawn(self) -> PageGraph:
        """The graph as the explorer's page takes it."""
        peaks = self.saved_bytes + self.workspace_bytes, self.saved_bytes_plain + self.workspace_bytes_plain
        places = tuple(path for path, _ in self.places if path)
        return PageGraph(self.kind, self.runs, places, self.remarks, self.steps, self.picture, peaks)
