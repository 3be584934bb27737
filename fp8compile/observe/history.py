"""The rows of statistics of observed values, combined into a history of each layer, step by step.

    headroom   log2(largest finite value of the dtype / amax): powers of two until it overflows; 0 where it did
    underflow  share of elements that are 0: all that underflowed, and what was 0 anyway

Graphs are ordered as they run: forwards as they were compiled, then their backwards in reverse. Within a graph rows are in
graph order.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from fp8compile.fx.aot import BACKWARD, FORWARD
from fp8compile.fx.provenance import module_names, parameter_names, whole_path
from fp8compile.numerics.formats import FP16_MAX
from fp8compile.numerics.histogram import AMAX, COLUMNS, INF, LARGE, NAN, SMALL, SUBNORMAL, ZERO
from fp8compile.observe.records import Observations, StatisticsRow

INPUT = "input"  # the op of an input
LARGEST = {
    "f16": FP16_MAX,
    "bf16": torch.finfo(torch.bfloat16).max,
    "f32": torch.finfo(torch.float32).max,
    "f64": torch.finfo(torch.float64).max,
    "complex64": torch.finfo(torch.float32).max,
    "complex128": torch.finfo(torch.float64).max,
}


@dataclass(frozen=True)
class StepStats:
    """One value in one step: numbers of elements, and the largest finite magnitude.

    Where elements are not counted (``ValueHistory.counted``), ``inf`` and ``nan`` are 1 for each backward that saw any.
    """

    step: int
    numel: int
    inf: int
    nan: int
    zero: int
    subnormal: int
    amax: float

    @property
    def overflowed(self) -> bool:
        """Whether an element was inf or NaN."""
        return self.inf + self.nan > 0


@dataclass(frozen=True)
class ValueHistory(StatisticsRow):
    """A row of observed statistics, and what was seen in it.

    Attributes:
        first_step: the first step with an inf or NaN, None where there was none.
        history: the steps that are kept, oldest first, the current one last.
    """

    first_step: int | None
    history: tuple[StepStats, ...]

    @property
    def data(self) -> bool:
        """Whether it is an input of the model, or of one of its graphs."""
        return self.op == INPUT and self.direction == FORWARD

    @property
    def at_first(self) -> StepStats | None:
        """What was seen in the step of the first overflow, if that step is still kept."""
        return next((seen for seen in self.history if seen.step == self.first_step), None)

    @property
    def amax(self) -> tuple[tuple[int, float], ...]:
        """(step, largest finite magnitude)."""
        return tuple((seen.step, seen.amax) for seen in self.history)

    @property
    def amax_before(self) -> float | None:
        """The largest finite magnitude in the last step before the first overflow."""
        before = [seen.amax for seen in self.history if self.first_step is None or seen.step < self.first_step]
        return before[-1] if before else None

    @cached_property
    def headroom(self) -> float:
        """Powers of two between the largest magnitude of all steps and that of the dtype; inf where all was 0."""
        return min((self.headroom_of(seen) for seen in self.history), default=math.inf)

    def headroom_of(self, seen: StepStats) -> float:
        """The same for one step."""
        if seen.overflowed:
            return 0.0
        return math.log2(LARGEST[self.dtype] / seen.amax) if seen.amax else math.inf

    @property
    def counted(self) -> bool:
        """Whether elements were counted. For a compiled forward, only amax is known and whether any was inf or NaN."""
        return self.direction == BACKWARD or any(seen.numel > seen.inf + seen.nan for seen in self.history)

    @property
    def underflow(self) -> float | None:
        """Share of elements that were 0, over all steps; None where they were not counted."""
        return self._share(sum(seen.zero for seen in self.history))

    @property
    def subnormal(self) -> float | None:
        """Share of elements below FP16's smallest normal number that were not 0; None where they were not counted."""
        return self._share(sum(seen.subnormal for seen in self.history))

    def _share(self, count: int) -> float | None:
        return count / max(1, sum(seen.numel for seen in self.history)) if self.counted else None

    @property
    def name(self) -> str:
        """``blocks.1.up forward mm.default``."""
        return f"{self.module or 'model'} {self.direction} {self.op}"

    def to_dict(self) -> dict[str, Any]:
        """All that is known, with the derived numbers."""
        derived = {"headroom": _json_number(self.headroom), "underflow": self.underflow, "subnormal": self.subnormal}
        return {**dataclasses.asdict(self), **derived}


def layers_of(
    several: Sequence[Observations], model: nn.Module | None = None, only: int | None = None
) -> tuple[ValueHistory, ...]:
    """The rows of some observations in the order in which they run, or row ``only``, with paths from the top of ``model``.

    The same row of the same parameters is one layer, even if the code was compiled twice.
    """
    builders: dict[tuple[StatisticsRow, int, frozenset[int]], _HistoryBuilder] = {}
    for number, each in enumerate(several):
        history, first, count = _on_host(each), each.first.tolist(), dict[StatisticsRow, int]()
        parameters, whole = frozenset(id(ref()) for ref in each.parameters), whole_rows(each, model)
        for index, row in enumerate(each.rows):
            count[row] = count.get(row, -1) + 1
            if only in (None, index):
                key = (row, count[row], parameters)
                builder = builders.setdefault(key, _HistoryBuilder(whole(row), run_order(row, number, index)))
                builder.take([(step, stats[index]) for step, stats in history if index < len(stats)], first[index])
    return tuple(builder.history() for builder in sorted(builders.values(), key=lambda builder: builder.order))


def first_overflow(layers: Sequence[ValueHistory]) -> ValueHistory | None:
    """The earliest overflow, None if there was none; for inputs see ``OverflowReport.first``."""
    broken = [(layer.first_step, i) for i, layer in enumerate(layers) if layer.first_step is not None]
    made = min((pair for pair in broken if not layers[pair[1]].data), default=(math.inf, 0))
    data = [pair for pair in broken if layers[pair[1]].data]
    guilty = [pair for pair in data if pair[0] == made[0] or _held_nan(layers[pair[1]])]
    found = min([*guilty, made], default=made)
    return None if math.isinf(found[0]) else layers[found[1]]


def by_severity(layers: Sequence[ValueHistory]) -> list[ValueHistory]:
    """The layers that overflowed, the earliest first; then the others, the least headroom first."""
    return sorted(layers, key=lambda layer: (layer.first_step or math.inf, layer.headroom))


def steps_of(layers: Sequence[ValueHistory]) -> tuple[int, ...]:
    """The steps that are kept for any layer."""
    return tuple(sorted({seen.step for layer in layers for seen in layer.history}))


def _held_nan(layer: ValueHistory) -> bool:
    return layer.at_first is not None and layer.at_first.nan > 0


class _HistoryBuilder:
    """A ``ValueHistory`` under construction."""

    def __init__(self, row: StatisticsRow, order: tuple[bool, int, int]) -> None:
        self.row, self.order = row, order
        self.steps: dict[int, list[float]] = {}
        self.firsts: list[int] = []

    def take(self, history: Sequence[tuple[int, list[float]]], first: int) -> None:
        for step, stats in history:
            self.steps[step] = _folded(self.steps[step], stats) if step in self.steps else stats
        self.firsts += [first] if first >= 0 else []

    def history(self) -> ValueHistory:
        history = tuple(step_stats(step, stats) for step, stats in sorted(self.steps.items()))
        firsts = [*self.firsts, *(seen.step for seen in history if seen.overflowed)]
        return ValueHistory(**dataclasses.asdict(self.row), first_step=min(firsts, default=None), history=history)


def run_order(row: StatisticsRow, number: int, index: int) -> tuple[bool, int, int]:
    """The sort key of a row. Graphs are numbered as their forwards run; their backwards run in reverse."""
    backward = row.direction == BACKWARD
    return backward, -number if backward else number, index


def whole_rows(each: Observations, model: nn.Module | None) -> Callable[[StatisticsRow], StatisticsRow]:
    """A function that gives a row its module path from the top of the model."""
    if model is None:
        return lambda row: row
    names = parameter_names(model)
    read = [names[id(ref())][0] for ref in each.parameters if id(ref()) in names]
    known = {*module_names(model).values(), *(name for several in names.values() for name in several)}
    return lambda row: dataclasses.replace(row, module=whole_path(row.module, known, read))


def _on_host(each: Observations) -> list[tuple[int, list[list[float]]]]:
    """(step, [rows, 7]) for all steps that are kept, and for the current step if anything was seen in it."""
    kept = [*each.history, (each.step + 1, each.current)] if each.additions else list(each.history)
    alike = len({stats.shape for _, stats in kept}) == 1  # rows may be added while it runs
    numbers = torch.stack([stats for _, stats in kept]).tolist() if alike else [stats.tolist() for _, stats in kept]
    return [(step, rows) for (step, _), rows in zip(kept, numbers, strict=True)]


def _folded(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [*(a + b for a, b in zip(one[:AMAX], other[:AMAX], strict=True)), max(one[AMAX], other[AMAX])]


def step_stats(step: int, stats: Sequence[float]) -> StepStats:
    """One row of statistics, ``[7]``, with names."""
    assert len(stats) == len(COLUMNS)
    small, large, inf, nan = (int(stats[column]) for column in (SMALL, LARGE, INF, NAN))
    return StepStats(step, small + large + inf + nan, inf, nan, int(stats[ZERO]), int(stats[SUBNORMAL]), stats[AMAX])


def _json_number(value: float) -> float | None:
    return value if math.isfinite(value) else None
