"""The report: every tensor rewritten, every tensor left alone and why, tied to module path and source line, in bytes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from fp8compile.memory import Fit, ModelBytes, predict


@dataclass(frozen=True)
class Origin:
    """Where a value comes from: the aten op that made it, the module it ran in, the user's source line."""

    op: str
    module: str
    source: str


@dataclass(frozen=True)
class Saved:
    """A tensor kept for the backward as codes. Bytes are at the shapes of the compilation."""

    name: str
    origin: Origin
    shape: str
    dtype: str
    bytes_before: int
    bytes_after: int
    codec: str


@dataclass(frozen=True)
class Skip:
    """Something left as it was, and why. ``bytes`` is what it keeps (0 where the question does not arise)."""

    name: str
    origin: Origin
    shape: str
    dtype: str
    bytes: int
    reason: str


@dataclass(frozen=True)
class Recomputed:
    """A tensor no longer kept because the backward makes it from ``sources``, which are kept anyway."""

    name: str
    origin: Origin
    shape: str
    dtype: str
    bytes_before: int
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Notes:
    """What one pass did to one graph."""

    saved: tuple[Saved, ...] = ()
    skips: tuple[Skip, ...] = ()
    recomputed: tuple[Recomputed, ...] = ()

    def __add__(self, other: Notes) -> Notes:
        return Notes(self.saved + other.saved, self.skips + other.skips, self.recomputed + other.recomputed)


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
        workspace_bytes, workspace_bytes_plain: an estimate of the most that its forward or backward needs beyond what is
            kept, the parameters and their gradients (see fp8compile/liveness.py), ours and plain Inductor's.
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

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> GraphReport:
        notes = data["notes"]
        return cls(
            data["kind"],
            Notes(
                tuple(Saved(**{**s, "origin": Origin(**s["origin"])}) for s in notes["saved"]),
                tuple(Skip(**{**s, "origin": Origin(**s["origin"])}) for s in notes["skips"]),
                tuple(
                    Recomputed(**{**r, "origin": Origin(**r["origin"]), "sources": tuple(r["sources"])})
                    for r in notes["recomputed"]
                ),
            ),
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
    linears: tuple[Any, ...] = field(default=())
    model: ModelBytes | None = None

    @property
    def saved(self) -> tuple[Saved, ...]:
        """Every tensor kept as codes."""
        return tuple(s for g in self.graphs for s in g.notes.saved)

    @property
    def skips(self) -> tuple[Skip, ...]:
        """Every tensor kept as it was, with the reason."""
        return tuple(s for g in self.graphs for s in g.notes.skips)

    @property
    def recomputed(self) -> tuple[Recomputed, ...]:
        """Every tensor that the backward now makes itself."""
        return tuple(r for g in self.graphs for r in g.notes.recomputed)

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
                "recipe": self.recipe,
                "saved_bytes": self.saved_bytes,
                "saved_bytes_plain": self.saved_bytes_plain,
                "linears": list(self.linears),
                "memory": self.fits().to_dict() if self.model else None,
                "graphs": [g.to_dict() for g in self.graphs],
            },
            indent=1,
        )

    def __str__(self) -> str:
        console = Console(width=150, no_color=True, highlight=False, markup=False)
        with console.capture() as capture:
            console.print(self._headline())
            for table in _tables(self):
                console.print(table)
            for remark in self.remarks:
                console.print(f"remark: {remark}")
        return "\n".join(line.rstrip() for line in capture.get().splitlines())

    def _headline(self) -> str:
        training = sum(g.kind == "training" for g in self.graphs)
        plain, ours = self.saved_bytes_plain, self.saved_bytes
        share = f" ({ours / plain:.0%})" if plain else ""
        return (
            f"fp8compile: {training} training and {len(self.graphs) - training} inference graph(s), {self.recipe}\n"
            f"kept for the backward: {human(ours)}, plain Inductor {human(plain)}{share}\n"
            f"{len(self.saved)} tensors encoded, {len(self.skips)} left as they are, "
            f"{len(self.recomputed)} recomputed instead of kept"
        )


def human(nbytes: float) -> str:
    """``1536 -> "1.5 KiB"``."""
    for unit in ("B", "KiB", "MiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"


def _tables(report: Report) -> Iterable[Table]:
    if report.saved:
        rows = [
            (
                s.name,
                *_where(s.origin),
                f"{s.dtype}{s.shape}",
                f"{human(s.bytes_before)} -> {human(s.bytes_after)}",
                s.codec,
            )
            for s in report.saved
        ]
        yield _table("encoded", ("tensor", "op", "module", "source", "shape", "bytes", "codec"), rows)
    if report.skips:
        rows = [(s.name, *_where(s.origin), f"{s.dtype}{s.shape}", human(s.bytes), s.reason) for s in report.skips]
        yield _table("left as they are", ("tensor", "op", "module", "source", "shape", "bytes", "reason"), rows)
    if report.recomputed:
        rows = [
            (r.name, *_where(r.origin), f"{r.dtype}{r.shape}", human(r.bytes_before), ", ".join(r.sources))
            for r in report.recomputed
        ]
        yield _table("recomputed", ("tensor", "op", "module", "source", "shape", "bytes", "made from"), rows)


def _where(origin: Origin) -> tuple[str, str, str]:
    return origin.op, origin.module or "-", origin.source or "-"


def _table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
