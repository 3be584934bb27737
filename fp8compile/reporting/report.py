"""The report: every tensor rewritten, every tensor left alone and why, tied to module path and source line, in bytes."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from fp8compile._text import WIDTH
from fp8compile.fx.snapshot import Step
from fp8compile.reporting.entries import Island, Linear, Notes, Observed, Recomputed, Saved, Skip
from fp8compile.reporting.memory import Fit, ModelBytes, predict
from fp8compile.reporting.text import text_of

SCHEMA = "fp8compile.report/2"  # 2: an entry holds its tensor as "info"; sizes are numbers; all that was left is in "skips"


@dataclass(frozen=True)
class GraphReport:
    """The report of one compiled graph.

    Attributes:
        kind: "training", or "inference" (nothing is saved, so nothing was rewritten).
        notes: what the passes did.
        saved_bytes: bytes kept from forward to backward, distinct storages; parameters, buffers and tensors that the
            caller owns (data, masks, tables) left out.
        saved_bytes_plain: the same for plain Inductor.
        remarks: what concerns the graph as a whole.
        steps: each pass with the graph before and after it; collected by ``fp8compile.explain`` only, not in the JSON.
        workspace_bytes, workspace_bytes_plain: an estimate of the most that its forward or backward needs beyond what is
            kept, the parameters and their gradients (see fp8compile/analysis/liveness.py), ours and plain Inductor's.
        runs: how often ``explain`` saw it run in one step.
    """

    kind: str
    notes: Notes = Notes()
    saved_bytes: int = 0
    saved_bytes_plain: int = 0
    remarks: tuple[str, ...] = ()
    workspace_bytes: int = 0
    workspace_bytes_plain: int = 0
    runs: int = 1
    steps: tuple[Step, ...] = field(default=(), compare=False, repr=False)

    def to_dict(self) -> dict[str, Any]:
        data = dataclasses.asdict(dataclasses.replace(self, steps=()))
        del data["steps"]
        return data

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
            data["runs"],
        )


@dataclass(frozen=True)
class Report:
    """What was done to a model: the reports of its graphs, in the order in which they were compiled.

    ``str(report)`` is a table, ``to_json()`` holds everything in it.
    """

    graphs: tuple[GraphReport, ...] = ()
    recipe: str = ""
    model: ModelBytes | None = None

    @cached_property
    def notes(self) -> Notes:
        """What the passes did to all graphs."""
        return sum((g.notes for g in self.graphs), Notes())

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Every matmul of a linear that is in FP8."""
        return self.notes.linears

    @property
    def saved(self) -> tuple[Saved, ...]:
        """Every tensor saved as codes."""
        return self.notes.saved

    @property
    def skips(self) -> tuple[Skip, ...]:
        """Everything that was left as it was, with the reason: saved tensors, linears, islands, observed values."""
        return self.notes.skips

    @property
    def recomputed(self) -> tuple[Recomputed, ...]:
        """Every tensor that the backward now recomputes."""
        return self.notes.recomputed

    @property
    def observed(self) -> tuple[Observed, ...]:
        """Every value whose statistics are taken (``fp8compile.overflow_report`` shows them)."""
        return self.notes.observed

    @property
    def islands(self) -> tuple[Island, ...]:
        """Every FP32 island."""
        return self.notes.islands

    @property
    def saved_bytes(self) -> int:
        """Bytes kept from forward to backward."""
        return sum(g.saved_bytes for g in self.graphs)

    @property
    def saved_bytes_plain(self) -> int:
        """What plain Inductor would keep for the same graphs."""
        return sum(g.saved_bytes_plain for g in self.graphs)

    @property
    def remarks(self) -> tuple[str, ...]:
        """What concerns a graph as a whole, each once."""
        return tuple(dict.fromkeys(r for g in self.graphs for r in g.remarks))

    def fits(self, card_gib: float = 80.0, states: float | torch.optim.Optimizer | None = None) -> Fit:
        """Whether a training step fits on a card, and what it needs; ``bool()`` and ``str()`` of the result say it.

        Activations are those of the batch that was compiled. A graph that runs several times in a step counts as often
        where the report comes from ``explain``, and once where it comes from ``report``.

        Args:
            card_gib: the memory of the card in GiB.
            states: what the optimizer holds: None is AdamW (two tensors in each trained parameter's dtype), a number is
                bytes per trained parameter, an optimizer that has stepped is counted.

        Raises:
            ValueError: a card or a number of bytes that cannot be, or an optimizer without state yet.
        """
        if self.model is None:
            raise ValueError("fits needs the report of a model: fp8compile.explain(model, args) or report(compiled).")
        kept = [(g.saved_bytes * g.runs, g.saved_bytes_plain * g.runs) for g in self.graphs]
        working = [(g.workspace_bytes, g.workspace_bytes_plain) for g in self.graphs]
        ours, plain = (sum(k[i] for k in kept) for i in (0, 1))
        most, most_plain = (max((w[i] for w in working), default=0) for i in (0, 1))
        return predict(self.model, (ours, plain), (most, most_plain), card_gib, states)

    def to_json(self) -> str:
        return json.dumps(
            {
                "schema": SCHEMA,
                "recipe": self.recipe,
                "saved_bytes": self.saved_bytes,
                "saved_bytes_plain": self.saved_bytes_plain,
                "memory": self.fits().to_dict() if self.model else None,
                "graphs": [g.to_dict() for g in self.graphs],
            },
            indent=1,
        )

    def as_text(self, width: int = WIDTH) -> str:
        """The report as tables, at most ``width`` columns wide: ``str(report)`` is 150."""
        kinds = [g.kind for g in self.graphs]
        both = (self.saved_bytes, self.saved_bytes_plain)
        return text_of(self.recipe, kinds, both, self.notes, self.remarks, width)

    def __str__(self) -> str:
        return self.as_text()
