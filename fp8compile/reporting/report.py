"""The report: every tensor rewritten, every tensor left alone and why, tied to module path and source line, in bytes."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch

from fp8compile._text import printed
from fp8compile.explorer.content import PageContent
from fp8compile.reporting.budget import Budget
from fp8compile.reporting.compiled_graph import GraphReport
from fp8compile.reporting.entries import (
    Chunked,
    Collective,
    Island,
    Linear,
    Notes,
    Observed,
    Offloaded,
    Recomputed,
    SavedEntry,
    Skip,
)
from fp8compile.reporting.entry import Entry
from fp8compile.reporting.explored import bars_of, page_content_of
from fp8compile.reporting.memory import Fit, ModelBytes, predict
from fp8compile.reporting.running import most_running
from fp8compile.reporting.tables import Entries
from fp8compile.reporting.text import all_of_it, bytes_table, first_screen, headline
from fp8compile.reporting.waterfall import Waterfall
from fp8compile.reporting.why import Why, why
from fp8compile.reporting.with_pages import WithPages

E = TypeVar("E", bound=Entry)

# 7: "peaks"; 6: "offloaded"; 5: "budgets"; 4: "places"; 3: "waterfall", "runs" counts in the sums; 2: a tensor is its "info"
SCHEMA = "fp8compile.report/7"
TABLES = ["linears", "islands", "saved", "skips", "recomputed", "observed", "collectives", "chunked", "offloaded"]


@dataclass(frozen=True)
class Report(WithPages):
    """What was done to a model: the reports of its graphs, in the order in which they were compiled.

    ``str(report)`` is a first screen of it; ``to_text()`` and ``to_json()`` hold everything. A graph counts as often as it
    runs in a step: ``saved_bytes`` of a block that is called eight times are eight times those of its graph.

    Attributes:
        graphs: the reports of the graphs.
        recipe: the recipe as text.
        model: what the model holds, for ``fits``.
        modules: the paths of the model's modules, for ``why``.
    """

    graphs: tuple[GraphReport, ...] = ()
    recipe: str = ""
    model: ModelBytes | None = None
    modules: frozenset[str] = frozenset()

    @cached_property
    def notes(self) -> Notes:
        """What the passes did to all graphs, once at each place where a graph stands."""
        return sum((notes for g in self.graphs for notes, _ in g.placed), Notes())

    def _entries(self, kind: type[E], name: str) -> Entries[E]:
        found = [(entry, times) for g in self.graphs for notes, times in g.placed for entry in getattr(notes, name)]
        return Entries(kind, (entry for entry, _ in found), (runs for _, runs in found))

    @property
    def linears(self) -> Entries[Linear]:
        """Every matmul of a linear that is in FP8 or INT8."""
        return self._entries(Linear, "linears")

    @property
    def saved(self) -> Entries[SavedEntry]:
        """Every tensor saved as codes."""
        return self._entries(SavedEntry, "saved")

    @property
    def skips(self) -> Entries[Skip]:
        """Everything that was left as it was, with the reason: saved tensors, linears, islands, observed values."""
        return self._entries(Skip, "skips")

    @property
    def recomputed(self) -> Entries[Recomputed]:
        """Every tensor that plain Inductor saves and the backward now recomputes."""
        return self._entries(Recomputed, "recomputed")

    @property
    def observed(self) -> Entries[Observed]:
        """Every value whose statistics are taken (``fp8compile.tools.overflow_report`` shows them)."""
        return self._entries(Observed, "observed")

    @property
    def islands(self) -> Entries[Island]:
        """Every FP32 island."""
        return self._entries(Island, "islands")

    @property
    def collectives(self) -> Entries[Collective]:
        """Every exchange between ranks that carries codes."""
        return self._entries(Collective, "collectives")

    @property
    def budgets(self) -> tuple[Budget, ...]:
        """For each graph under a ``Recipe.memory.budget``, what it was to reach and the frontier: peak against time."""
        return tuple(budget for g in self.graphs for budget in g.notes.budgets)

    @property
    def chunked(self) -> Entries[Chunked]:
        """Every matrix of logits that is computed in chunks."""
        return self._entries(Chunked, "chunked")

    @property
    def offloaded(self) -> Entries[Offloaded]:
        """All codes that wait for the backward on the host; they are no part of ``saved_bytes``."""
        return self._entries(Offloaded, "offloaded")

    @property
    def host_bytes(self) -> int:
        """Bytes that a step keeps on the host for its backward."""
        return sum(entry.bytes * times for entry, times in zip(self.offloaded, self.offloaded.times, strict=True))

    @property
    def tables(self) -> tuple[Entries[Any], ...]:
        """The entries of each kind."""
        return tuple(getattr(self, name) for name in TABLES)

    @property
    def waterfall(self) -> Waterfall:
        """From the bytes that plain Inductor saves to ours, by rewrite: ``changes``; and what ours hold: ``parts``.

        ``saved_bytes_plain + sum(c.nbytes for c in changes) == saved_bytes == sum(p.nbytes for p in parts)``.
        """
        return sum((g.waterfall * g.runs for g in self.graphs), Waterfall())

    def why(self, module: str) -> Why:
        """What was done in one module and all under it, and what was not, with the reason; ``print`` shows it.

        Args:
            module: its path, such as "layers.0.mlp". A tensor belongs to the module that made it.

        Raises:
            ValueError: the model has no such module, and nothing in the report names it.
        """
        return why(module, self.notes, self.modules)

    @property
    def saved_bytes(self) -> int:
        """Bytes saved for backward on the device in a step."""
        return sum(g.saved_bytes * g.runs for g in self.graphs)

    @property
    def saved_bytes_plain(self) -> int:
        """What plain Inductor would save for the same graphs."""
        return sum(g.saved_bytes_plain * g.runs for g in self.graphs)

    @property
    def remarks(self) -> tuple[str, ...]:
        """What concerns a graph as a whole, each once."""
        return tuple(dict.fromkeys(r for g in self.graphs for r in g.remarks))

    def fits(self, card_gib: float = 80.0, states: float | torch.optim.Optimizer | None = None) -> Fit:
        """Whether a training step fits on a card, and what it needs; ``bool()`` and ``str()`` of the result say it.

        Activations are those of the batch that was compiled. A graph that runs several times in a step counts as often.

        Args:
            card_gib: the memory of the card in GiB.
            states: what the optimizer holds. None is AdamW (two tensors in each trained parameter's dtype), a number is
                bytes per trained parameter; of an optimizer that has stepped, the states are counted.

        Raises:
            ValueError: a card or a number of bytes that cannot be, or an optimizer without state yet.
        """
        if self.model is None:
            raise ValueError("fits needs the report of a model: fp8compile.explain(model, args) or report(compiled).")
        most = max((g.workspace_bytes for g in self.graphs), default=0)
        most_plain = max((g.workspace_bytes_plain for g in self.graphs), default=0)
        saved = self.saved_bytes, self.saved_bytes_plain
        model = dataclasses.replace(self.model, weights=self.model.weights + sum(self.notes.bytes_of_codes.values()))
        running = self._running(model.gradients)
        training = [g for g in self.graphs if g.kind == "training"]
        generated = bool(training) and all(g.is_generated for g in training)
        working = most, most_plain
        return predict(model, saved, working, running, card_gib, states, self.host_bytes, generated)

    def _running(self, gradients: int) -> tuple[int, int, int]:
        """The most that forward and backward have alive: ours, plain Inductor's, ours where no gradient outlives the
        backward of its graph. Calls of a graph stand together."""
        calls = [g for g in self.graphs for _ in range(g.runs)]
        ours = [(g.known_peaks, g.saved_bytes) for g in calls]
        plain = [(g.peaks_plain, g.saved_bytes_plain) for g in calls]
        return most_running(ours, gradients), most_running(plain, gradients), most_running(ours, 0)

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

    @cached_property
    def page_content(self) -> PageContent:
        """The report as the explorer's page takes it."""
        return page_content_of(
            (self._head[0].removeprefix("fp8compile: "), *self._head[1:], *self.remarks),
            self.graphs,
            bars_of(self.saved_bytes_plain, self.saved_bytes, self.waterfall),
            self.modules,
        )

    def to_text(self) -> str:
        """The first screen's figures, then every table, 150 columns wide."""
        lines = [f"remark: {remark}" for remark in self.remarks]
        return printed([*all_of_it(self._head, self._amounts, self.tables), *lines], wrap=True)

    def __str__(self) -> str:
        parts = first_screen(self._head, self._amounts, self.tables, self.remarks)
        return printed(parts, wrap=True, width=None)

    @property
    def _head(self) -> list[str]:
        kinds = [(g.kind, g.runs) for g in self.graphs]
        return headline(self.recipe, kinds, (self.saved_bytes, self.saved_bytes_plain), self.notes)

    @property
    def _amounts(self) -> list[Any]:
        if not self.saved_bytes_plain and not self.saved_bytes:
            return []
        return bytes_table(self.saved_bytes_plain, self.saved_bytes, self.waterfall)
