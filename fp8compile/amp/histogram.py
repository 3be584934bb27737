"""h1 and h2 of an update: from the rows that a scaler was asked to look at, and from gradients that nobody observed.

f16 rows, backward     small -> h1; large, inf, nan -> h2
f32 rows, backward     inf, nan -> h2: FP16 numbers once, cast under autocast. The rest says nothing of FP16
.grad of a parameter   if no hook and no compiled graph saw it: as an f16 row (whatever its dtype); else, what is inf or
                       NaN after micro-batches and ranks were summed -> h2
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from fp8compile.amp.buckets import COUNTED, IGNORED, NONFINITE
from fp8compile.amp.gradients import Gradient
from fp8compile.amp.watching import Watched, check_patterns, chosen
from fp8compile.fx.aot import BACKWARD
from fp8compile.numerics.histogram import COLUMNS, INF, LARGE, NAN, SMALL
from fp8compile.observe.records import REST, WEIGHT, Observations, StatisticsRow, StatsSlot

# Dtypes of the unobserved gradients that a histogram counts; the range of the other dtypes needs no loss scale.
COUNTED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_log = logging.getLogger("fp8compile")


class Counter:
    """Sums h1 and h2 over what is selected.

    Args:
        kinds, modules: the kinds and modules of the rows that count.
    """

    def __init__(self, kinds: Sequence[str], modules: Sequence[str]) -> None:
        self.kinds, self.modules = tuple(kinds), tuple(modules)
        self._weights: weakref.WeakKeyDictionary[Observations, Tensor] = weakref.WeakKeyDictionary()
        self._paths: set[str] = set()  # names of gradients that nobody observed
        self._checked = self._said = False

    def of_rows(self, observations: Observations, seen: Tensor) -> Tensor:
        """``[rows, 7]`` -> float64 ``[2]``: h1 and h2 of the rows selected."""
        known = self._weights.get(observations)
        if known is None or len(known) != len(seen):
            known = self._weights_of(observations, len(seen)).to(seen.device)
            self._weights[observations] = known
        return seen.flatten() @ known.flatten(0, 1)  # whole numbers times 0 or 1: exact

    def _weights_of(self, observations: Observations, count: int) -> Tensor:
        """``[rows, 7, 2]``: how each number enters h1 and h2."""
        weights = torch.zeros(count, len(COLUMNS), 2, dtype=torch.float64)
        for i, row in enumerate(observations.rows[:count]):
            if row.direction == BACKWARD and row.kind in self.kinds and self._takes(row):
                if row.dtype == "f16":
                    weights[i, SMALL, 0] = 1
                    weights[i, [LARGE, INF, NAN], 1] = 1
                elif row.dtype == "f32":
                    weights[i, [INF, NAN], 1] = 1
        return weights

    def _takes(self, row: StatisticsRow) -> bool:
        """Whether a row's module is chosen; a row that may be of any module always counts."""
        return row.op == REST or chosen(row.module, self.modules)

    def looks(self, gradients: Sequence[Gradient], seen: set[int]) -> list[str]:
        """What counts of each gradient as it lies in ``.grad``; ``seen``: ids of parameters observed already.

        Raises:
            ValueError: modules are chosen, and a parameter that nobody observed has no name.
        """
        if WEIGHT not in self.kinds:
            return [IGNORED] * len(gradients)
        found = [self._look(each, seen) for each in gradients]
        if not seen and not self._said:
            self._said = True
            _log.warning("no statistics of layers: the loss scale follows the gradients of weights alone. Compile the model "
                         'with backend="fp8compile", or call fp8compile.amp.watch(model)')  # fmt: skip
        return found

    def _look(self, each: Gradient, seen: set[int]) -> str:
        if id(each.p) in seen:
            return NONFINITE
        return COUNTED if self._chosen(each) and each.values.dtype in COUNTED_DTYPES else IGNORED

    def _chosen(self, each: Gradient) -> bool:
        if "*" in self.modules:
            return True
        if each.name is None:
            raise ValueError(
                f"modules={self.modules!r}, and a parameter of shape {[*each.p.shape]} has no name: call "
                "fp8compile.amp.watch(model), or build the optimizer from model.named_parameters()"
            )
        self._paths.add(each.name)
        return chosen(each.name, self.modules)

    def check(self, observations: Sequence[Observations]) -> None:
        """Check once that every pattern matches something. Raises ValueError with the names nearest to one that does not."""
        if not self._checked:
            for each in observations:
                self._paths |= {row.module for row in each.rows}
                self._paths |= each.paths if isinstance(each, Watched) else set()
            check_patterns(self.modules, sorted(self._paths - {""}))
            self._checked = True


def parameters_seen(observations: Sequence[Observations]) -> set[int]:
    """``id`` of the parameters whose gradients are counted; one without a row is left for the optimizer's own count."""
    found: set[int] = set()
    for each in observations:
        found |= (
            each.hooked_ids
            if isinstance(each, Watched)
            else each.parameters_seen()
            if isinstance(each, StatsSlot)
            else set()
        )
    return found
