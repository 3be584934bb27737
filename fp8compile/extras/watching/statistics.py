"""What a step's statistics say: how near the nearest value was to an overflow, and which layer overflowed first.

    headroom   the least over all values of log2(largest finite value of its dtype / amax); 0 where one was inf or NaN

The rows are those of ``fp8compile.observe``: of FP16 graphs, and of others with ``fp32.observe=True``. Inputs of the model
are left out of the headroom, since a mask of -inf is one. Which value comes first is decided as in ``overflow_report``.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fp8compile.extras.watching.late import Late
from fp8compile.numerics.histogram import AMAX, INF, NAN
from fp8compile.observe.history import LARGEST, ValueHistory, first_overflow, run_order, step_stats, whole_rows
from fp8compile.observe.records import Observations, StatisticsRow, alive, of_model
from fp8compile.observe.text import line_of

_log = logging.getLogger("fp8compile")
MOST_LOOKED_AT = 64  # values with an inf or NaN that are looked at, the first of a graph as they run; all are counted
MOST_LISTED = 8  # of them in a line of the run
NOT_TAKEN = "run with options={'observe': True}, which takes the statistics that name a layer"
NOT_SEEN = "none of the observed values was inf or NaN"
NOT_OURS = "a LossScaler ends the steps of this model's statistics: give it to extras.watching.watch(model, scaler)"


class NamedRows:
    """The rows of one of the model's observations, with names from the top of the model."""

    def __init__(self, number: int, observed: Observations, model: nn.Module) -> None:
        self.number, self.observed = number, weakref.ref(observed)
        self.rows = tuple(map(whole_rows(observed, model), observed.rows))
        self.largest = torch.tensor([LARGEST.get(row.dtype, math.inf) for row in self.rows], dtype=torch.float64)
        self.data = torch.tensor([row.kind == "data" for row in self.rows], dtype=torch.bool)

    def order(self, index: int) -> tuple[bool, int, int]:
        """The sort key of a row: when it runs."""
        return run_order(self.rows[index], self.number, index)


@dataclass(frozen=True)
class PendingStatistics:
    """What one of the model's observations saw in a step, on its way to the host."""

    rows: NamedRows
    stats: Late


class Statistics:
    """Collects, step by step, what the observations of a model saw.

    Args:
        model: whose observations.
        scaled: whether a loss scaler ends the steps that are collected. Where it does not, statistics that one has taken
            over are left out: their steps end later than these.
    """

    def __init__(self, model: nn.Module, scaled: bool = False) -> None:
        self._model, self._scaled = weakref.ref(model), scaled
        self._others = False  # whether a scaler that is not ours ends steps of these observations
        self.remarks: list[str] = []  # of the steps since they were last taken
        self._known: tuple[tuple[int, int], ...] = ()
        self._rows: list[NamedRows] = []
        self._consumed: weakref.WeakKeyDictionary[Observations, int] = weakref.WeakKeyDictionary()
        self._before: dict[int, Tensor] = {}  # by observation, the step before, on the host

    @property
    def why_unknown(self) -> str:
        """Why a layer is not named."""
        return NOT_OURS if self._others else NOT_SEEN if self._rows else NOT_TAKEN

    def collect(self) -> list[PendingStatistics]:
        """What was closed since the last call. No host sync."""
        self._refresh()
        parts = []
        for rows in self._rows:
            observed = rows.observed()
            if observed is None or self._is_anothers(observed) or not observed.history:
                continue
            step, stats = observed.history[-1]
            if step != self._consumed.get(observed) and len(stats) == len(rows.rows):
                self._consumed[observed] = step
                parts.append(PendingStatistics(rows, Late(stats)))
        return parts

    def _is_anothers(self, observed: Observations) -> bool:
        """Whether a scaler that is not ours ends its steps; said once."""
        found = observed.scaled and not self._scaled
        if found and not self._others:
            self.remarks.append(f"no statistics are written: {NOT_OURS}")
            _log.warning("%s", self.remarks[-1])
        self._others = self._others or found
        return found

    def _refresh(self) -> None:
        """Look the observations up again where some came, went or grew."""
        known = tuple((id(each), len(each.rows)) for each in alive())
        model, gone = self._model(), any(rows.observed() is None for rows in self._rows)
        if (known != self._known or gone) and model is not None:
            self._known = known
            self._rows = [NamedRows(number, each, model) for number, each in enumerate(of_model(model))]

    def read(self, step: int, parts: Iterable[PendingStatistics]) -> dict[str, Any]:
        """``headroom``, ``nearest`` and, where a value was inf or NaN, ``overflow``; waits for parts that are under way."""
        least, nearest, broken, count = math.inf, "", list[tuple[tuple[bool, int, int], ValueHistory]](), 0
        for part in parts:
            rows, stats = part.rows, part.stats.value()
            bad = stats[:, INF] + stats[:, NAN] > 0
            ratio = torch.where(bad, 1.0, rows.largest / stats[:, AMAX]).masked_fill(rows.data, math.inf)
            lowest, at = ratio.min(0) if len(ratio) else (torch.tensor(math.inf), torch.tensor(0))
            if float(lowest) < least:
                least, nearest = float(lowest), name_of(rows.rows[int(at)])
            if bool(bad.any()):
                broken += self._broken(step, rows, stats, bad)
                count += int(bad.sum())
            self._before[rows.number] = stats
        found: dict[str, Any] = {"headroom": math.log2(least), "nearest": nearest} if least < math.inf else {}
        layers = [layer for _, layer in sorted(broken, key=lambda pair: pair[0])]
        first = first_overflow(layers)
        return found if first is None else found | {"overflow": overflow(first, layers, count)}

    def _broken(
        self, step: int, rows: NamedRows, stats: Tensor, bad: Tensor
    ) -> list[tuple[tuple[bool, int, int], ValueHistory]]:
        """The rows with an inf or NaN as histories of this step and the one before."""
        before, found = self._before.get(rows.number), []
        for index in sorted(torch.nonzero(bad).flatten().tolist(), key=rows.order)[:MOST_LOOKED_AT]:
            history = [step_stats(step, stats[index].tolist())]
            if before is not None and index < len(before):
                history.insert(0, step_stats(step - 1, before[index].tolist()))
            row = dataclasses.asdict(rows.rows[index])
            found.append((rows.order(index), ValueHistory(**row, first_step=step, history=tuple(history))))
        return found


def name_of(row: StatisticsRow) -> str:
    """``blocks.1.up forward mm.default``."""
    return f"{row.module or 'model'} {row.direction} {row.op}"


def overflow(first: ValueHistory, layers: Sequence[ValueHistory], count: int) -> dict[str, Any]:
    """An overflow as a line of the run has it: the first value as text, how many there were, the first as they ran."""
    return {"line": line_of(first), "count": count, "layers": [_layer(each) for each in layers[:MOST_LISTED]]}


def _layer(layer: ValueHistory) -> dict[str, Any]:
    seen = layer.at_first
    assert seen is not None
    counts = {"inf": seen.inf, "nan": seen.nan} | ({"of": seen.numel} if layer.counted else {})
    return {name: getattr(layer, name) for name in ("module", "direction", "op", "kind", "source", "dtype")} | counts
